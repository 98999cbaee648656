"""The slow, obvious answer: one row at a time, in plain Python."""

from megatron_eopt.matrices import Split


def rows_of_rank(split: Split, tp_size: int, tp_rank: int) -> list[tuple[int, int]]:
    """Return, for each local row from top to bottom, (part, row in the part's stack)."""
    held: list[tuple[int, int]] = []
    for expert in range(split.experts):
        first_part = 0
        for section in split.sections:
            rows: list[tuple[int, int]] = []
            for block in range(section.blocks):
                for number, field in enumerate(section.fields):
                    for row in range(field.rows):
                        in_expert = block * field.rows + row
                        below = expert * section.blocks * field.rows
                        rows.append((first_part + number, below + in_expert))
            piece = len(rows) // tp_size
            held += rows[tp_rank * piece : (tp_rank + 1) * piece]
            first_part += len(section.fields)
    return held
