"""What one parameter is made of: the logical matrices that a fused weight glues together.

Note [Sections, fields, parts]
    Read a weight of shape ``(rows, cols)`` from top to bottom. It is a pile of *sections*.
    A section is a pattern of *fields* (so many rows for the queries of a group, so many for its
    key, its value) that repeats ``blocks`` times. All rows of one field, taken from every block in
    order, make a *part*: Q, K, V, gate, up. A part is one logical matrix, or, where its field names
    a ``unit``, a stack of equal ones (heads).

    Sections exist because of tensor parallelism: every rank holds an equal slab of *each* section,
    one slab after the other. A fused QKV is one section, cut wherever its rows happen to
    end, even inside a query group. Gate and up are two sections, so that each rank holds a piece
    of both. A weight of shape ``(experts, rows, cols)`` is that many weights, one per expert.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megatron_eopt.base.errors import ConfigurationError

type SplitT = Literal["qkv", "gated", "mla", "linear_attention", "per_head"]
"""Kinds of fused weights that can be split; ``per_head`` makes every head of the others' attention
projections a matrix of its own."""


@dataclass(frozen=True, slots=True)
class Field:
    """Rows that belong together inside one block of a section."""

    name: str  # name of the part that these rows build, for example ``"q"``
    rows: int  # number of rows in every block
    unit: int | None = None  # rows of one logical matrix; ``None`` when the whole part is one


@dataclass(frozen=True, slots=True)
class Section:
    """A pattern of fields, repeated; see Note [Sections, fields, parts]."""

    fields: tuple[Field, ...]  # the fields of one block, top to bottom
    blocks: int = 1  # how often the pattern repeats

    @property
    def period(self) -> int:
        """Rows of one block."""
        return sum(field.rows for field in self.fields)

    @property
    def rows(self) -> int:
        """Rows of the whole section in the unsharded parameter."""
        return self.period * self.blocks


@dataclass(frozen=True, slots=True)
class Part:
    """All rows of one field: ``count`` logical matrices of equal shape."""

    name: str
    count: int  # number of matrices (1, heads, experts, or experts x heads)
    shape: tuple[int, int]  # ``(rows, cols)`` of each of them; updates are scaled by this shape


@dataclass(frozen=True, slots=True)
class LogicalMatrix:
    """What the optimizer treats as one matrix."""

    name: str  # the part's name, with an index where the part is a stack: ``q``, ``gate.17``
    shape: tuple[int, int]  # ``(rows, cols)`` of the unsharded matrix


@dataclass(frozen=True)
class Split:
    """The logical matrices of one unsharded parameter; hashable, equal on all ranks.

    Raises:
        ConfigurationError: If the sections do not add up to the rows of ``shape``, a size is not
            positive, or a unit does not divide its part.
    """

    kind: str  # what was split, for tables and logs: ``"qkv"``, ``"gated"``, ``"mla"``, ...
    shape: tuple[int, ...]  # unsharded, ``(rows, cols)`` or ``(experts, rows, cols)``
    sections: tuple[Section, ...]  # top to bottom

    def __post_init__(self) -> None:
        if len(self.shape) not in (2, 3) or min(self.shape) < 1:
            rule = "must be (rows, cols) or (experts, rows, cols) without a size of 0"
            way_out = "Leave other parameters to an element-wise optimizer"
            raise ConfigurationError("shape", self.shape, rule, way_out)
        total = sum(section.rows for section in self.sections)
        if total != self.rows:
            pattern = f"the {self.kind} split {self.describe()}"
            rule = f"its {self.rows} rows must be the {total} that {pattern} adds up to"
            way_out = "Give the unsharded shape, or another split"
            raise ConfigurationError("shape", self.shape, rule, way_out)
        for field, blocks, unit in self._fields():
            rows = field.rows * blocks
            if rows < 1 or unit < 1 or rows % unit:
                sizes = (field.rows, blocks, field.unit)
                rule = "(rows, blocks, unit) must be positive, and the unit divide rows x blocks"
                raise ConfigurationError(field.name, sizes, rule, "Choose sizes that fit")

    def _fields(self) -> Iterator[tuple[Field, int, int]]:
        """Yield each field, how often it occurs and the rows of one of its matrices."""
        for section in self.sections:
            for field in section.fields:
                unit = field.rows * section.blocks if field.unit is None else field.unit
                yield field, section.blocks, unit

    @property
    def experts(self) -> int:
        """Length of the leading dimension, 1 for a two-dimensional weight."""
        return self.shape[0] if len(self.shape) == 3 else 1

    @property
    def rows(self) -> int:
        """Rows of one expert's unsharded weight."""
        return self.shape[-2]

    @property
    def cols(self) -> int:
        """Columns of the unsharded weight."""
        return self.shape[-1]

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts, in the order of their fields."""
        return tuple(
            Part(field.name, self.experts * (field.rows * blocks // unit), (unit, self.cols))
            for field, blocks, unit in self._fields()
        )

    @cached_property
    def matrices(self) -> tuple[LogicalMatrix, ...]:
        """Every logical matrix: part by part, and inside a part expert by expert, head by head."""
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


def whole(shape: tuple[int, ...]) -> Split:
    """Return the split of a plain weight: one matrix, or one per expert.

    Raises:
        ConfigurationError: If ``shape`` is not ``(rows, cols)`` or ``(experts, rows, cols)``.
    """
    kind = "experts" if len(shape) == 3 else "whole"
    return Split(kind, tuple(shape), (Section((Field("weight", _rows(shape)),)),))


def periodic(
    kind: str,  # name of the split
    shape: tuple[int, ...],  # ``(rows, cols)`` or ``(experts, rows, cols)``
    lengths: Mapping[str, int],  # rows of each field in one block, top to bottom
    *,
    units: Mapping[str, int] | None = None,  # rows of one matrix, of fields that are stacks (heads)
) -> Split:
    """Return one section whose pattern repeats to the end of the weight.

    Tensor parallelism cuts such a weight into equal slabs, wherever the pattern may be.

    Raises:
        ConfigurationError: If the pattern does not divide the rows.
    """
    fields = _fields(lengths, units)
    blocks = max(_rows(shape) // max(sum(lengths.values()), 1), 1)
    return Split(kind, tuple(shape), (Section(fields, blocks),))


def side_by_side(
    kind: str,
    shape: tuple[int, ...],
    lengths: Mapping[str, int],
    *,
    units: Mapping[str, int] | None = None,
) -> Split:
    """Return one section per field: tensor parallelism gives each rank a piece of every field.

    Arguments as in :func:`periodic`; ``lengths`` are those of the whole unsharded weight.

    Raises:
        ConfigurationError: If the lengths do not add up to the rows.
    """
    sections = tuple(Section((field,)) for field in _fields(lengths, units))
    return Split(kind, tuple(shape), sections)


def gated(shape: tuple[int, ...], *, interleave: int | None = None) -> Split:
    """Return gate and up of a gated MLP's first weight.

    Args:
        shape: ``(2 x ffn, hidden)`` or ``(experts, 2 x ffn, hidden)``.
        interleave: Where gate and up alternate in blocks, the rows of one block; ``None`` where
            the upper half is the gate and the lower half is up.

    Raises:
        ConfigurationError: If the rows are not two equal halves, or not whole pairs of blocks.
    """
    if interleave is not None:
        return periodic("gated", shape, {"gate": interleave, "up": interleave})
    half = _rows(shape) // 2
    return side_by_side("gated", shape, {"gate": half, "up": half})


def qkv(
    shape: tuple[int, ...],  # ``(rows, hidden)`` of the fused weight
    lengths: Iterable[int],  # rows in one query group: three of q, k, v or four of q, gate, k, v
    *,
    head_dim: int | None = None,  # rows of one head, to make every head a matrix of its own
) -> Split:
    """Return Q, K and V of a fused projection in grouped-query order.

    The order is that of megatron-core: group after group, and in each the queries of all its
    heads, then (where attention has an output gate) their gates, then one key and one value.

    Raises:
        ConfigurationError: If ``lengths`` is not three or four numbers that divide the rows.
    """
    sizes = tuple(lengths)
    names = {3: ("q", "k", "v"), 4: ("q", "gate", "k", "v")}.get(len(sizes))
    if names is None:
        rule = "must be the rows of q, k, v or of q, gate, k, v in one query group"
        raise ConfigurationError("qkv_split_shapes", sizes, rule, "Give three or four numbers")
    units = None if head_dim is None else dict.fromkeys(names, head_dim)
    return periodic("qkv", shape, dict(zip(names, sizes, strict=True)), units=units)


def _fields(lengths: Mapping[str, int], units: Mapping[str, int] | None) -> tuple[Field, ...]:
    return tuple(Field(name, rows, (units or {}).get(name)) for name, rows in lengths.items())


def _rows(shape: tuple[int, ...]) -> int:
    # 0, which no split accepts, where there are no rows and columns
    return shape[-2] if len(shape) > 1 else 0
