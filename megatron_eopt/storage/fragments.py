"""Which fragment of which parameter each rank of a redistribution group stores."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import SPLIT_ATTRIBUTE
from megatron_eopt.matrices import Split, whole
from megatron_eopt.optimizers.stored import Fragment, StoredParameter
from megatron_eopt.storage.redistribution_groups import RankGrid

__all__ = ["BufferPlace", "locate", "stored_parameter"]


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """Where a parameter lies in its bucket, counted from the bucket's start.

    Attributes:
        name: The parameter's name.
        start: First element.
        stop: One past the last.
        shard: Elements of a bucket that each data-parallel rank holds.
    """

    name: str
    start: int
    stop: int
    shard: int

    def held_by(self, data_rank: int) -> tuple[int, int]:
        """Return the range of the flattened parameter that a rank holds; empty if start == stop."""
        low = max(self.start, data_rank * self.shard)
        high = min(self.stop, (data_rank + 1) * self.shard)
        return (low - self.start, high - self.start) if low < high else (0, 0)


def locate(
    buffers: Iterable[Any], names: Mapping[torch.Tensor, str]
) -> dict[torch.Tensor, BufferPlace]:
    """Return where every parameter of ``buffers`` lies, in an order that all ranks share."""
    places = {}
    for buffer in buffers:
        for param in buffer.params:
            start, stop, bucket_id = buffer.param_index_map[param]
            bucket = buffer.buckets[bucket_id]
            shard = bucket.grad_data.numel() // buffer.data_parallel_group.size()
            places[param] = BufferPlace(
                names[param], start - bucket.offset, stop - bucket.offset, shard
            )
    return places


def stored_parameter(
    param: Any, place: BufferPlace, optimizer: Any, ranks: RankGrid, *, slabs: bool = False
) -> StoredParameter:
    """Return how a group stores one parameter.

    Args:
        param: The model's parameter; its attributes say how tensor parallelism cuts it.
        place: Where it lies in its bucket.
        optimizer: Its optimizer, which may know how it is put together.
        ranks: The group.
        slabs: Whether each tensor-parallel slab counts as a parameter of its own; ``ranks`` are
            then those of one slab.

    Raises:
        ConfigurationError: If weight rematerialization cuts the parameter once more, or a slab
            does not consist of whole blocks of its split.
    """
    if getattr(param, "is_gtp_weight_remat", False):
        rule = "weight rematerialization cuts this matrix once more, which its owner cannot see"
        raise ConfigurationError(place.name, tuple(param.shape), rule, "Turn it off")
    dim = getattr(param, "partition_dim", -1)
    if not (dim in (0, 1) and getattr(param, "tensor_model_parallel", False)):
        dim = -1
    size = 1 if dim == -1 else ranks.tensor_size
    split = _split_of(param, _unsharded(tuple(param.shape), dim, size), optimizer)
    if slabs and size > 1:
        split = _slab_of(split, size, dim, place.name)
    if slabs or size == 1:
        size, dim = 1, -1
    fragments = (
        Fragment(tensor_rank if size > 1 else 0, *place.held_by(data_rank))
        for tensor_rank, data_rank in zip(ranks.tensor_ranks, ranks.data_ranks, strict=True)
    )
    return StoredParameter(
        name=place.name, split=split, partition_dim=dim, tp_size=size, fragments=tuple(fragments)
    )


def _split_of(param: Any, shape: tuple[int, ...], optimizer: Any) -> Split:
    """Return the logical matrices: as routing said, else the optimizer, else the user."""
    told = getattr(param, SPLIT_ATTRIBUTE, None)
    if told is not None or hasattr(param, SPLIT_ATTRIBUTE):
        return told or whole(shape)
    if hasattr(optimizer, "split_of"):
        split: Split = optimizer.split_of(param, shape)
        return split
    declared = getattr(param, "eopt_split", None)
    return declared if isinstance(declared, Split) else whole(shape)


def _slab_of(split: Split, size: int, dim: int, name: str) -> Split:
    """Return the split of one tensor-parallel slab of a parameter."""
    if dim == 1:
        return replace(split, shape=(*split.shape[:-1], split.cols // size))
    sections = []
    for section in split.sections:
        if section.blocks % size == 0:
            sections.append(replace(section, blocks=section.blocks // size))
        elif len(section.fields) == 1 and section.rows % size == 0:
            field = replace(section.fields[0], rows=section.rows // size)
            sections.append(replace(section, fields=(field,), blocks=1))
        else:
            raise ConfigurationError(
                "tp_mode",
                "blockwise",
                f"cuts {name} ({split.describe()}) inside a block, so a slab has no whole parts",
                "Choose another tp_mode, or do not split this weight",
            )
    shape = (*split.shape[:-2], split.rows // size, split.cols)
    return replace(split, shape=shape, sections=tuple(sections))


def _unsharded(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, int]:
    """Return rows and columns of the whole; what has more or fewer dimensions counts as rows."""
    sizes = [shape[0] if shape else 1, math.prod(shape[1:])]
    if dim != -1:
        sizes[dim] *= size
    return sizes[0], sizes[1]
