"""Layouts of torch's DTensor shards."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.layouts.boxes import Boxes, Int64Array
from megatron_eopt.layouts.layout import Layout


def dtensor_layout(
    shape: Sequence[int],  # global shape
    mesh: npt.NDArray[np.int64],  # the redistribution group's rank at every place of the mesh
    placements: Sequence[Placement],  # one per mesh dimension
    *,
    copy: int = 0,  # which of the replicas is the source, modulo their number
    name: str = "placements",  # name of the parameter, for messages
) -> Layout:
    """Describe how a DTensor of two or more dimensions lies on a mesh.

    Leading dimensions are folded into rows: a ``(experts, rows, cols)`` weight becomes a matrix of
    ``experts * rows`` rows, out of which :meth:`Layout.select_rows` takes one expert. A rank's
    storage tensor is its flattened local shard. An index of the matrix as ``copy`` spreads the work
    of sending over the replicas.

    Raises:
        ConfigurationError: For a placement that is neither Shard nor Replicate, or for a mesh or
            shape with the wrong number of dimensions.
    """
    if len(shape) < 2:
        rule = "must have at least two dimensions to hold matrices"
        raise ConfigurationError(name, tuple(shape), rule, "Give it to a scalar optimizer")
    if mesh.ndim != len(placements):
        rule = f"must have one placement for each of the {mesh.ndim} mesh dimensions"
        raise ConfigurationError(name, tuple(placements), rule, "Pass the mesh of the DTensor")
    places = np.stack([axis.ravel() for axis in np.indices(mesh.shape)], axis=1)
    low = np.zeros((len(places), len(shape)), np.int64)
    size = np.tile(np.array(shape, np.int64), (len(places), 1))
    for axis in _cutting_order(placements, name):
        placement = placements[axis]
        if not placement.is_replicate():
            # a strided shard is not an instance of Shard in every version, but has its dim
            dim = int(getattr(placement, "dim")) % len(shape)  # noqa: B009
            _cut(low[:, dim], size[:, dim], places[:, axis], mesh.shape[axis])
    source = _is_source(places, placements, mesh.shape, copy)
    return _fold(tuple(shape), low, size, mesh.ravel(), source)


def _cutting_order(placements: Sequence[Placement], name: str) -> list[int]:
    """Order mesh dimensions as torch cuts: left to right, strided shards last.

    ``fully_shard`` on top of tensor parallelism cuts the tensor-parallel shard although its mesh
    dimension comes first; torch marks that with a strided shard.
    """
    strided = [type(placement).__name__ == "_StridedShard" for placement in placements]
    for placement, is_strided in zip(placements, strided, strict=True):
        if not is_strided and not isinstance(placement, Shard | Replicate):
            rule = "must be Shard or Replicate on every mesh dimension"
            way_out = "Redistribute the tensor (a Partial one is not reduced yet)"
            raise ConfigurationError(name, tuple(placements), rule, way_out)
    return sorted(range(len(placements)), key=strided.__getitem__)


def _cut(low: Int64Array, size: Int64Array, place: Int64Array, parts: int) -> None:
    """Cut ranges in place as torch.chunk does: all chunks full but the last ones."""
    chunk = -(-size // parts)
    begin = np.minimum(place * chunk, size)
    low += begin
    size[:] = np.minimum(begin + chunk, size) - begin


def _is_source(
    places: Int64Array, placements: Sequence[Placement], extents: Sequence[int], copy: int
) -> Int64Array:
    """Mark the ``copy``-th replica of every shard."""
    replica = np.zeros(len(places), np.int64)
    copies = 1
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            replica = replica * extents[axis] + places[:, axis]
            copies *= extents[axis]
    return np.equal(replica, copy % copies).astype(np.int64)


def _fold(
    shape: tuple[int, ...], low: Int64Array, size: Int64Array, rank: Int64Array, source: Int64Array
) -> Layout:
    """Turn blocks of an n-dimensional tensor into boxes of the matrix of its last dimension."""
    *lead, rows, cols = shape
    blocks = []
    for i in np.flatnonzero(size.prod(axis=1)).tolist():
        *_, height, width = size[i].tolist()
        ranges = [np.arange(a, a + n) for a, n in zip(low[i, :-2], size[i, :-2], strict=True)]
        grid = np.meshgrid(*ranges, indexing="ij")
        outer = np.ravel_multi_index([g.ravel() for g in grid], lead) if lead else np.zeros(1)
        outer = outer.astype(np.int64)
        full = bool(len(lead) < 2 and height == rows)
        count = len(outer)
        blocks.append(
            Boxes.make(
                rank=rank[i],
                corner=((outer[:1] if full else outer) * rows + low[i, -2], low[i, -1]),
                size=(count * rows if full else height, width),
                offset=0 if full else np.arange(count, dtype=np.int64) * height * width,
                stride=width,
                source=source[i],
            )
        )
    return Layout((int(np.prod(lead, dtype=np.int64)) * rows, cols), Boxes.join(blocks))
