"""The logical matrices of a parameter, for example Q, K and V of a fused QKV weight.

Note [Sections, fields, parts]
    From top to bottom, a weight of shape ``(rows, cols)`` is a sequence of *sections*. A section is
    a pattern of *fields* that repeats ``blocks`` times; in a QKV weight, a block is a query group
    with fields for its queries, its key and its value. All rows of one field, taken from every
    block in order, form a *part*: Q, K, V, gate, up. A part is one logical matrix or, if its field
    sets ``unit``, a stack of equal matrices (heads).

    Tensor parallelism cuts each section separately: a rank holds an equal slice of *every* section,
    one after the other. A fused QKV weight is one section, and a cut may fall inside a query group.
    Gate and up are two sections, so each rank holds a slice of both. A 3-D weight
    ``(experts, rows, cols)`` has these sections for each expert.

    A *transposed* weight stores ``(in, out)``, as GPT-2's Conv1D of transformers does. Its sections
    go from left to right and consist of columns. A weight of more dimensions, such as a
    convolution's, is seen as ``(rows, all others)``.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError, check_integer

type SplitT = Literal["qkv", "gated", "mla", "linear_attention", "per_head"]
"""Kinds of fused weights to split; ``per_head`` also splits attention projections into heads."""


@dataclass(frozen=True, slots=True)
class Field:
    """Consecutive rows in each block of a section that belong to one part."""

    name: str  # name of the part, for example ``"q"``
    rows: int  # number of rows per block
    unit: int | None = None  # rows per logical matrix; ``None`` if the part is one matrix

    def __post_init__(self) -> None:
        check_integer(f"rows of {self.name!r}", self.rows)
        if self.unit is not None:
            check_integer(f"rows of a matrix in {self.name!r}", self.unit)


@dataclass(frozen=True, slots=True)
class Section:
    """A repeated pattern of fields; see Note [Sections, fields, parts]."""

    fields: tuple[Field, ...]  # the fields of one block, top to bottom
    blocks: int = 1  # how often the pattern repeats

    def __post_init__(self) -> None:
        check_integer("blocks", self.blocks)

    @property
    def period(self) -> int:
        """Rows per block."""
        return sum(field.rows for field in self.fields)

    @property
    def rows(self) -> int:
        """Rows of the section in the unsharded parameter."""
        return self.period * self.blocks


@dataclass(frozen=True, slots=True)
class Part:
    """All rows of one field, which form ``count`` logical matrices of equal shape."""

    name: str
    count: int  # number of matrices (1, heads, experts, or experts x heads)
    shape: tuple[int, int]  # ``(rows, cols)`` of each matrix, as it is stored


@dataclass(frozen=True, slots=True)
class LogicalMatrix:
    """A matrix that the optimizer orthogonalizes by itself."""

    name: str  # the part's name, with an index if the part is a stack: ``q``, ``gate.17``
    shape: tuple[int, int]  # ``(rows, cols)`` of the unsharded matrix


@dataclass(frozen=True)
class Split:
    """The logical matrices of one unsharded parameter; hashable, and equal on all ranks.

    Raises:
        ConfigurationError: If the sections do not add up to the outputs of ``shape``, a size is not
            positive, or a unit does not divide its part.
        ConfigurationTypeError: If a size is not an integer.
    """

    kind: str  # name for tables and logs: ``"qkv"``, ``"gated"``, ``"mla"``, ...
    shape: tuple[int, ...]  # unsharded, ``(rows, cols)`` or ``(experts, rows, cols)``
    sections: tuple[Section, ...]  # top to bottom, or left to right if transposed
    transposed: bool = False  # whether the rows are inputs, and the sections cut columns

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_shape(self.shape))
        total = sum(section.rows for section in self.sections)
        if total != self.outputs:
            cut = "columns" if self.transposed else "rows"
            rule = f"has {self.outputs} {cut}, but its {self.kind} split {self.describe()} has "
            hint = "Pass the unsharded shape, or another split"
            raise ConfigurationError("shape", self.shape, f"{rule}{total}", hint)
        for field, blocks, unit in self._fields():
            if field.rows * blocks % unit:
                sizes = (field.rows, blocks, field.unit)
                rule = "(rows, blocks, unit): unit must divide rows x blocks"
                raise ConfigurationError(field.name, sizes, rule, "Choose sizes that fit")

    def _fields(self) -> Iterator[tuple[Field, int, int]]:
        """Yield each field, its number of blocks, and the rows of one of its matrices."""
        for section in self.sections:
            for field in section.fields:
                unit = field.rows * section.blocks if field.unit is None else field.unit
                yield field, section.blocks, unit

    @property
    def experts(self) -> int:
        """Size of the expert dimension, 1 for a 2-D weight."""
        return self.shape[0] if len(self.shape) == 3 else 1

    @property
    def rows(self) -> int:
        """Rows of one expert's unsharded weight."""
        return self.shape[-2]

    @property
    def cols(self) -> int:
        """Columns of the unsharded weight."""
        return self.shape[-1]

    @property
    def outputs(self) -> int:
        """Size of the dimension that the sections cut: the rows, or the columns if transposed."""
        return self.cols if self.transposed else self.rows

    @property
    def is_by_head(self) -> bool:
        """Whether a part consists of matrices of a given size, such as heads, be it one head."""
        return any(field.unit is not None for field, _, _ in self._fields())

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts, in the order of their fields."""
        return tuple(
            Part(
                field.name,
                self.experts * (field.rows * blocks // unit),
                (self.rows, unit) if self.transposed else (unit, self.cols),
            )
            for field, blocks, unit in self._fields()
        )

    @cached_property
    def matrices(self) -> tuple[LogicalMatrix, ...]:
        """Every logical matrix, ordered by part, then expert, then head."""
        return tuple(
            LogicalMatrix(part.name if part.count == 1 else f"{part.name}.{index}", part.shape)
            for part in self.parts
            for index in range(part.count)
        )

    def describe(self) -> str:
        """Return the pattern in one short line, such as ``(q 256 | k 64 | v 64) x 8``."""
        patterns = []
        for section in self.sections:
            fields = " | ".join(f"{field.name} {field.rows}" for field in section.fields)
            patterns.append(f"({fields}) x {section.blocks}" if section.blocks > 1 else fields)
        return " | ".join(patterns)


def checked_shape(shape: Iterable[int]) -> tuple[int, ...]:
    """Return the shape in which a weight's matrices lie, with dimensions from the fourth on folded.

    Raises:
        ConfigurationError: If the weight has fewer than two dimensions, or an empty one.
        ConfigurationTypeError: If ``shape`` is not a sequence of integers.
    """
    try:
        sizes = tuple(shape)
    except TypeError as error:
        rule, hint = "must be a sequence of integers", "Pass the weight's shape"
        raise ConfigurationTypeError("shape", shape, rule, hint) from error
    if len(sizes) > 3:
        sizes = (sizes[0], math.prod(sizes[1:]))
    for size in sizes:
        check_integer("shape", size, at_least=0)
    if len(sizes) < 2 or min(sizes) < 1:
        rule = "must be (rows, cols), (experts, rows, cols) or a convolution's, with positive sizes"
        hint = "Train other parameters with an element-wise optimizer"
        raise ConfigurationError("shape", sizes, rule, hint)
    return sizes


def whole(shape: Sequence[int]) -> Split:
    """Return the split of a plain weight: one matrix, or one per expert.

    Raises:
        ConfigurationError: If ``shape`` has fewer than two dimensions.
    """
    return _whole(checked_shape(shape))


@lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> Split:
    kind = "experts" if len(shape) == 3 else "whole"
    return Split(kind, shape, (Section((Field("weight", shape[-2]),)),))


def transposed(split: Split) -> Split:
    """Return the split of a weight that stores the transpose: its input dimension comes first.

    For GPT-2 of transformers: ``transposed(qkv(weight.shape[::-1], [hidden, hidden, hidden]))``, or
    ``transposed(whole(weight.shape[::-1]))`` for a plain weight.

    Args:
        split: The split of the transposed weight ``(out, in)`` or ``(experts, out, in)``.
    """
    if not isinstance(split, Split):
        rule, hint = "must be a Split", "Pass whole(weight.shape[::-1]) for a plain weight"
        raise ConfigurationTypeError("transposed(split)", split, rule, hint)
    *experts, rows, cols = split.shape
    kind = "transposed" if split.kind in ("whole", "experts", "groups") else split.kind
    return replace(split, kind=kind, shape=(*experts, cols, rows), transposed=not split.transposed)


def periodic(
    kind: str,  # name of the split
    shape: tuple[int, ...],  # ``(rows, cols)`` or ``(experts, rows, cols)``
    lengths: Mapping[str, int],  # rows of each field in one block, top to bottom
    *,
    units: Mapping[str, int] | None = None,  # rows per matrix, for fields that are stacks (heads)
) -> Split:
    """Return a split of one section, whose pattern repeats to the end of the weight.

    Tensor parallelism cuts it into equal slices, which may end inside a block.

    Raises:
        ConfigurationError: If the rows are not a multiple of the pattern.
    """
    fields, shape = _fields(lengths, units), checked_shape(shape)
    # at least one, so that a weight that is too small raises Split's error, which names its rows
    blocks = max(shape[-2] // sum(field.rows for field in fields), 1) if fields else 1
    return Split(kind, shape, (Section(fields, blocks),))


def side_by_side(
    kind: str,
    shape: tuple[int, ...],
    lengths: Mapping[str, int],
    *,
    units: Mapping[str, int] | None = None,
) -> Split:
    """Return a split with one section per field, so that each rank holds a slice of every field.

    Arguments are those of :func:`periodic`; ``lengths`` are rows of the whole unsharded weight.

    Raises:
        ConfigurationError: If the lengths do not add up to the rows.
    """
    sections = tuple(Section((field,)) for field in _fields(lengths, units))
    return Split(kind, shape, sections)


def per_head(shape: tuple[int, ...], head_dim: int) -> Split:
    """Return the split of an attention projection into one matrix for each head.

    Args:
        shape: ``(heads x head_dim, hidden)``.
        head_dim: Rows of one head.

    Raises:
        ConfigurationError: If ``head_dim`` does not divide the rows.
    """
    shape = checked_shape(shape)
    return Split("per_head", shape, (Section((Field("head", shape[-2], head_dim),)),))


def gated(shape: tuple[int, ...], *, interleave: int | None = None) -> Split:
    """Return the split of a gated MLP's first weight into gate and up.

    Args:
        shape: ``(2 x ffn, hidden)`` or ``(experts, 2 x ffn, hidden)``.
        interleave: Rows per block if gate and up alternate in blocks; ``None`` if the upper half is
            the gate and the lower half is up.

    Raises:
        ConfigurationError: If the rows are not two equal halves, or not whole pairs of blocks.
    """
    if interleave is not None:
        return periodic("gated", shape, {"gate": interleave, "up": interleave})
    # an odd number of rows raises Split's error
    half = checked_shape(shape)[-2] // 2
    return side_by_side("gated", shape, {"gate": half, "up": half})


def qkv(
    shape: tuple[int, ...],  # ``(rows, hidden)`` of the fused weight
    lengths: Iterable[int],  # rows in one query group: three of q, k, v or four of q, gate, k, v
    *,
    head_dim: int | None = None,  # rows of one head, to make every head a matrix of its own
) -> Split:
    """Return the split of a fused QKV projection in grouped-query order, as in megatron-core.

    For each query group the weight has the queries of all its heads, then their gates if attention
    has an output gate, then one key and one value.

    Raises:
        ConfigurationError: If ``lengths`` is not three or four numbers that divide the rows.
    """
    try:
        sizes = tuple(lengths)
    except TypeError as error:
        rule, hint = "must be a sequence of integers", "Pass the rows of q, k and v"
        raise ConfigurationTypeError("qkv_split_shapes", lengths, rule, hint) from error
    names = {3: ("q", "k", "v"), 4: ("q", "gate", "k", "v")}.get(len(sizes))
    if names is None:
        rule = "must be the rows of q, k, v or of q, gate, k, v in one query group"
        raise ConfigurationError("qkv_split_shapes", sizes, rule, "Pass three or four numbers")
    units = None if head_dim is None else dict.fromkeys(names, head_dim)
    return periodic("qkv", shape, dict(zip(names, sizes, strict=True)), units=units)


def _fields(lengths: Mapping[str, int], units: Mapping[str, int] | None) -> tuple[Field, ...]:
    return tuple(Field(name, rows, (units or {}).get(name)) for name, rows in lengths.items())
