"""Builders of the splits that fused weights need; sizes are those of the unsharded parameter."""

from collections.abc import Iterable, Mapping

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.matrices.split import Field, Section, Split


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
