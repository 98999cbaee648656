"""Layouts of tensors that are boxes of a whole parameter, such as torch DTensors."""

from collections.abc import Sequence

import numpy as np
from torch.distributed.tensor.placement_types import Placement, Shard

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import Int64Array
from megatron_eopt.layouts.boxes import Boxes, Mask, ragged_arange
from megatron_eopt.layouts.layout import Layout


def dtensor_layout(
    shape: Sequence[int],  # global shape
    mesh: Int64Array,  # rank in the redistribution group, by mesh coordinates
    placements: Sequence[Placement],  # one per mesh dimension
    *,
    cols: int | None = None,  # columns of the matrix; None for the last dimension
    name: str = "placements",  # name of the parameter, for messages
) -> Layout:
    """Return the layout of a DTensor of two or more dimensions on a device mesh.

    Leading dimensions are folded into rows: a ``(experts, rows, cols)`` weight becomes a matrix of
    ``experts * rows`` rows, from which :meth:`Layout.select_rows` selects one expert. Dimensions
    that make up ``cols``, such as all but the first of a convolution, are folded into columns. A
    rank's storage tensor is its flattened local shard. Of replicas, the first is the source.

    Raises:
        ConfigurationError: If a placement is neither Shard nor Replicate, or cuts the kernel of a
            convolution.
    """
    # row r has the coordinates of the r-th rank of `mesh.ravel()`
    places = np.stack([axis.ravel() for axis in np.indices(mesh.shape)], axis=1)
    low = np.zeros((len(places), len(shape)), np.int64)
    high = np.tile(np.array(shape, np.int64), (len(places), 1))
    first = np.ones(len(places), bool)
    # Torch shards left to right, strided shards last: `fully_shard` cuts the tensor-parallel shard
    # although its mesh dimension comes first, which torch marks with _StridedShard. In some
    # versions that is no subclass of Shard, but it has `dim`.
    strided = [type(placement).__name__ == "_StridedShard" for placement in placements]
    for axis in sorted(range(mesh.ndim), key=strided.__getitem__):
        placement, place = placements[axis], places[:, axis]
        if placement.is_replicate():
            # replicas hold the same elements, of which only one copy may be sent
            first &= place == 0
            continue
        if not strided[axis] and not isinstance(placement, Shard):
            rule = "placements must be Shard or Replicate on every mesh dimension"
            hint = "Call redistribute() on the tensor (a Partial one is not reduced yet)"
            raise ConfigurationError(name, tuple(placements), rule, hint)
        dim = int(getattr(placement, "dim")) % len(shape)  # noqa: B009
        # like torch.chunk: all chunks but the last ones are full
        chunk = -(-(high[:, dim] - low[:, dim]) // mesh.shape[axis])
        low[:, dim] = np.minimum(low[:, dim] + place * chunk, high[:, dim])
        high[:, dim] = np.minimum(low[:, dim] + chunk, high[:, dim])
    return block_layout(shape, low, high, mesh.ravel(), first, cols=cols or shape[-1], name=name)


def block_layout(
    shape: Sequence[int],  # whole shape, of two or more dimensions
    low: Int64Array,  # index of the first element of each block, ``(blocks, dimensions)``
    high: Int64Array,  # one past the last
    ranks: Int64Array,  # rank that stores each block, ``(blocks,)``
    sources: Mask,  # whether each block is the copy that counts, ``(blocks,)``
    *,
    cols: int,  # columns of the matrix
    name: str = "parameter",  # for messages
) -> Layout:
    """Return the layout of blocks of a tensor, folded to a matrix as in :func:`dtensor_layout`.

    Raises:
        ConfigurationError: If a block cuts the kernel of a convolution.
    """
    shape, low, high = _with_columns(shape, low, high, cols, name)
    return _fold(shape, low, high, ranks, sources)


def _with_columns(
    shape: Sequence[int], low: Int64Array, high: Int64Array, cols: int, name: str
) -> tuple[Sequence[int], Int64Array, Int64Array]:
    """Fold the last dimensions of a tensor, and of its blocks, into one of ``cols`` elements."""
    first = len(shape) - 1
    while np.prod(shape[first:], dtype=np.int64) < cols:
        first -= 1
    # `first` is the dimension that columns begin with; a shard must hold all dimensions after it
    # completely, or its part of a row would not be one run of columns
    kernel = slice(first + 1, None)
    size = int(np.prod(shape[kernel], dtype=np.int64))
    if np.any(high[:, kernel] - low[:, kernel] < np.array(shape[kernel], np.int64)):
        rule = "is a convolution whose kernel is cut, so that a rank holds no whole columns"
        hint = "Shard its first or second dimension"
        raise ConfigurationError(name, tuple(shape), rule, hint)
    low, high = low[:, : first + 1].copy(), high[:, : first + 1].copy()
    low[:, first] *= size
    high[:, first] *= size
    return (*shape[:first], shape[first] * size), low, high


def _fold(
    shape: Sequence[int], low: Int64Array, high: Int64Array, rank: Int64Array, source: Mask
) -> Layout:
    """Convert blocks of an n-D tensor to boxes of a matrix with the same last dimension."""
    *lead, rows, cols = shape
    index = np.array(list(np.ndindex(*lead)), np.int64)
    leading = slice(len(lead))
    inside = (index >= low[:, None, leading]) & (index < high[:, None, leading])
    # a block that spans several indices of the leading dimensions becomes one box for each
    block, outer = np.nonzero(inside.all(axis=2))
    height, width = (high - low)[block, -2:].T
    boxes = Boxes.make(
        rank=rank[block],
        corner=(outer * rows + low[block, -2], low[block, -1]),
        size=(height, width),
        # local shards are dense, so the boxes of one block follow one another in its memory
        offset=ragged_arange(np.bincount(block)) * height * width,
        stride=width,
        source=source[block],
    )
    return Layout((len(index) * rows, cols), boxes)
