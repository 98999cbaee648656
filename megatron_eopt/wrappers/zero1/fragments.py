"""Fragments of Megatron's flat buffers: which part of each parameter a data-parallel rank has."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.place import remat_size, whole_shape
from megatron_eopt.matrices import Split
from megatron_eopt.routing.parameters import cut_dimension
from megatron_eopt.storage.shard import Fragment, ParamShard, fragment_layouts
from megatron_eopt.storage.slabs import SplitOf
from megatron_eopt.wrappers.zero1.buffers import BufferSet, RankGrid

_NOTHING = Fragment(0, 0, 0)


class BufferRange(NamedTuple):
    """Position of a parameter in its bucket, which is cut evenly over the data-parallel ranks."""

    name: str
    start: int  # of the parameter, counted from the bucket's first element
    stop: int
    shard: int  # elements of the bucket on each rank

    @property
    def holders(self) -> range:
        """The data-parallel ranks that have a part of the parameter."""
        return range(self.start // self.shard, -(-self.stop // self.shard))

    def held_by(self, data_rank: int) -> tuple[int, int]:
        """Return the range of the flattened parameter on a rank, or ``(0, 0)``."""
        low = max(self.start, data_rank * self.shard)
        high = min(self.stop, (data_rank + 1) * self.shard)
        return (low - self.start, high - self.start) if low < high else (0, 0)


def ranges_in(buffer_set: BufferSet, names: Mapping[Tensor, str]) -> dict[Tensor, BufferRange]:
    """Return the position of every parameter of a set, in the same order on all ranks."""
    places = {}
    for buffer in buffer_set.all_buffers:
        ranks = buffer.data_parallel_group.size()
        # DDP pads buckets, so that this divides evenly; the last ranks have the padding
        shards = [bucket.grad_data.numel() // ranks for bucket in buffer.buckets]
        for param in buffer.params:
            start, stop, number = buffer.param_index_map[param]
            offset = buffer.buckets[number].offset
            places[param] = BufferRange(names[param], start - offset, stop - offset, shards[number])
    return places


def fragment_of(
    param: Tensor, place: BufferRange, split_of: SplitOf, grid: RankGrid, *, slabs: bool = False
) -> ParamShard:
    """Return the shard of one parameter that is stored in fragments.

    With ``slabs``, each tensor-parallel slab is a parameter of its own, and ``grid`` is its grid.

    Raises:
        ConfigurationError: If a slab does not consist of whole blocks of its split, or weight
            rematerialization cuts a slab.
    """
    dim = cut_dimension(param)
    size = 1 if dim == -1 else grid.tensor_size
    whole = whole_shape(param)
    # unsharded rows and columns; the trailing dimensions count as columns
    unsharded = [whole[0] if whole else 1, math.prod(whole[1:])]
    if dim != -1:
        unsharded[dim] *= size
    split = split_of(param, tuple(unsharded))
    slab = None
    if slabs and remat_size(param) > 1:
        rule = f"needs whole slabs on each rank, but weight rematerialization cuts {place.name}"
        raise ConfigurationError("tp_mode", "blockwise", rule, "Choose another tp_mode")
    if slabs and size > 1:
        split = _slab_of(split, size, dim, place.name)
        slab = (grid.tensor_ranks[grid.ranks.rank], size)
    if slabs or size == 1:
        size, dim = 1, -1
    coordinates = zip(grid.tensor_ranks, grid.row_ranks, grid.data_ranks, strict=True)
    holders = place.holders
    fragments = [
        # ranks with equal fragments have copies, so what no tensor parallelism cuts has rank 0
        Fragment(tensor if size > 1 else 0, *place.held_by(data)).of_rows(param, rows)
        if data in holders
        else _NOTHING
        for tensor, rows, data in coordinates
    ]
    fragment = fragments[grid.ranks.rank]
    start, stop = place.held_by(grid.data_ranks[grid.ranks.rank])
    return ParamShard(
        place.name,
        param,
        split,
        fragment_layouts(split, dim, size, fragments),
        grid.ranks,
        (stop - start,),
        slab,
        padding=(stop - start) - (fragment.stop - fragment.start),
    )


def _slab_of(split: Split, size: int, dim: int, name: str) -> Split:
    """Return the split of one tensor-parallel slab of a parameter."""
    *experts, rows, cols = split.shape
    shape = (*experts, rows // size, cols) if dim == 0 else (*experts, rows, cols // size)
    # the cut is along the columns of the matrices, so the rows of the split stay as they are
    if (dim == 1) != split.transposed:
        return replace(split, shape=shape)
    sections = []
    for section in split.sections:
        if section.blocks % size == 0:
            sections.append(replace(section, blocks=section.blocks // size))
        # a section of one matrix may be cut anywhere: each slab then has a matrix of its own
        elif len(section.fields) == 1 and section.rows % size == 0:
            field = replace(section.fields[0], rows=section.rows // size)
            sections.append(replace(section, fields=(field,), blocks=1))
        else:
            rule = f"needs whole blocks per rank, but {name} ({split.describe()}) is cut inside one"
            hint = "Choose another tp_mode, or do not split this weight"
            raise ConfigurationError("tp_mode", "blockwise", rule, hint)
    return replace(split, shape=shape, sections=tuple(sections))
