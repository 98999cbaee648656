"""Random splits, small enough for the oracle."""

from hypothesis import settings
from hypothesis import strategies as st

from megatron_eopt.matrices import Field, Section, Split

# no deadline: the machine that runs the tests may be busy with others
randomly = settings(deadline=None, max_examples=30)


@st.composite
def splits(draw: st.DrawFn, tp_size: int = 1) -> Split:
    """Draw a split whose sections all divide by ``tp_size``, with units and experts."""
    sections: list[Section] = []
    for number in range(draw(st.integers(1, 3))):
        rows = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
        blocks = draw(st.integers(1, 4)) * (tp_size if sum(rows) % tp_size else 1)
        fields = []
        for index, length in enumerate(rows):
            units = [n for n in range(1, length + 1) if length * blocks % n == 0]
            unit = draw(st.sampled_from([None, *units]))
            fields.append(Field(f"f{number}{index}", length, unit))
        sections.append(Section(tuple(fields), blocks))
    total = sum(section.rows for section in sections)
    shape = (total, draw(st.integers(1, 3)) * tp_size)
    experts = draw(st.sampled_from([None, 1, 2, 3]))
    return Split("random", shape if experts is None else (experts, *shape), tuple(sections))
