"""Where a parameter's elements lie in a checkpoint, and which boxes a flat fragment covers there.

A checkpoint holds a tensor of the unsharded parameter's shape for every kind of state. A fragment
of a flattened parameter is no box of that tensor, but a few boxes together: the rest of a first
row, whole rows, the start of a last one. Each is saved, and read, by itself. So nothing is gathered
to be saved, nothing superfluous is read, and the layout of the run does not show in the checkpoint.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.checkpoint.keys import key_apart

type _Cut = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Box:
    """Part of a stored tensor, or of a whole local parameter, that is a box of a checkpoint's.

    Attributes:
        sharded: The box and its tensor, without data; the key is the model's.
        start: The first element, in the flattened stored tensor.
        strides: Elements of it between neighbours, for each dimension of the box.
    """

    sharded: ShardedTensor
    start: int
    strides: tuple[int, ...]

    def view(self, stored: Tensor) -> Tensor:
        """Return the box of a stored tensor, without copying it.

        Raises:
            ConfigurationError: If it is a DTensor, as of megatron-core under torch FSDP2.
        """
        if isinstance(stored, DTensor):
            rule = "has no form in this format: the optimizer is megatron-core's own for DTensors"
            way_out = "Save without optimizer state, as torch_dcp, or train with another optimizer"
            raise ConfigurationError("sharded_state_dict", self.sharded.key, rule, way_out)
        start = stored.storage_offset() + self.start
        return stored.detach().as_strided(self.sharded.local_shape, self.strides, start)


class ParameterSpace:
    """Where the elements of a parameter lie.

    Args:
        key: What the model saves it as.
        shards: Its boxes, with stand-ins for data that tell which elements they are.

    Attributes:
        sharded: One of its boxes, which has what all have in common: whole shape, replica.
        keys: Names of the checkpoint's tensors that it is part of, without optimizer prefixes.
        places: Its places in the leading dimensions that number layers or experts.
        name: Its own name, unique in the model.
        prepended: Leading dimensions of the checkpoint's tensor that number layers or experts.
    """

    def __init__(self, key: str, shards: Sequence[ShardedTensor]) -> None:
        self._boxes = [_box(shard) for shard in shards]
        self.sharded = self._boxes[0].sharded
        self.keys = tuple(dict.fromkeys(shard.key for shard in shards))
        self.prepended = shards[0].prepend_axis_num
        # layers or experts may share a key; the places of leading dimensions tell them apart
        self.places = tuple(shards[0].global_offset[: self.prepended])
        self.name = key_apart(key, self.places)

    def boxes(self, start: int, stop: int) -> list[Box]:
        """Return the boxes of the elements ``start`` to ``stop`` of the flattened parameter."""
        found = []
        for box in self._boxes:
            shape = box.sharded.local_shape
            order = sorted(range(len(shape)), key=lambda d: (-box.strides[d], d))
            back = [order.index(d) for d in range(len(shape))]
            sizes = [shape[d] for d in order]
            strides = [box.strides[d] for d in order]
            for offset, lengths in cut(sizes, strides, start - box.start, stop - box.start):
                places = zip(box.sharded.global_offset, back, strict=True)
                sharded = replace(
                    box.sharded,
                    local_shape=tuple(lengths[d] for d in back),
                    global_offset=tuple(whole + offset[d] for whole, d in places),
                )
                first = box.start - start + int(math.sumprod(offset, strides))
                found.append(Box(sharded, first, box.strides))
        return found


def parameter_spaces(
    model_state: Mapping[str, Any], params: Iterable[Tensor]
) -> dict[Tensor, ParameterSpace]:
    """Return where each of the model's parameters lies in a checkpoint.

    Raises:
        ConfigurationError: If a parameter is not in the model's state, or is saved as something
            else than its own elements.
    """
    kinds = ShardedTensor, ShardedTensorFactory
    entries = [item for item in nested_values(model_state) if isinstance(item, kinds)]
    bases = {id(item.data): item for item in entries}
    views: dict[int, list[ShardedTensor]] = {}
    for item in entries:
        if isinstance(item, ShardedTensor) and item.data is not None and item.data._is_view():
            views.setdefault(id(item.data._base), []).append(item)
    spaces = {}
    for param in params:
        # of a DTensor the entry holds this tensor; to_local() returns another one
        held = param._local_tensor if isinstance(param, DTensor) else param
        base = bases.get(id(held))
        if base is not None:
            spaces[param] = ParameterSpace(base.key, _shards(base))
        elif pieces := _pieces(held, views.get(id(held), ())):
            spaces[param] = ParameterSpace(pieces[0].key, pieces)
        else:
            raise ConfigurationError(
                "model_sharded_state_dict",
                f"a parameter of shape {tuple(param.shape)}",
                "is stepped by the optimizer and is not in the model's state",
                "Build it from the wrapped model with sharded_state_dict(), which keeps the "
                "parameters themselves (keep_vars=True)",
            )
    return spaces


def cut(sizes: Sequence[int], strides: Sequence[int], start: int, stop: int) -> Iterator[_Cut]:
    """Yield the boxes ``(offset, lengths)`` of a strided view's elements in a range.

    Args:
        sizes: Of the view's dimensions.
        strides: Of the same; descending, each at least the extent of all that follow.
        start: First element, counted as the strides count.
        stop: One past the last.
    """
    if 0 in sizes or not (start < stop and stop > 0):
        return
    if not sizes:
        if start <= 0:
            yield (), ()
        return
    (size, *inner_sizes), (stride, *inner_strides) = sizes, strides
    extent = 1 + sum((n - 1) * s for n, s in zip(inner_sizes, inner_strides, strict=True))
    touched = max(0, (start - extent) // stride + 1), min(size, -(-stop // stride))
    whole = max(touched[0], -(-start // stride)), min(touched[1], (stop - extent) // stride + 1)
    if whole[0] < whole[1]:
        yield (whole[0], *(0 for _ in inner_sizes)), (whole[1] - whole[0], *inner_sizes)
    else:
        whole = touched[1], touched[1]
    for row in (*range(touched[0], whole[0]), *range(whole[1], touched[1])):
        before = row * stride
        for offset, lengths in cut(inner_sizes, inner_strides, start - before, stop - before):
            yield (row, *offset), (1, *lengths)


def _shards(base: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """Return a parameter's boxes, with stand-ins for data that tell which elements they are."""
    stand_in = torch.empty(base.data.shape, dtype=base.data.dtype, device="meta")
    if isinstance(base, ShardedTensor):
        return [replace(base, data=stand_in)]
    built = list(nested_values(base.build_fn(base.key, stand_in, base.replica_id, None)))
    views = [item.data for item in built if isinstance(item, ShardedTensor)]
    if len(views) < len(built) or not all(v is stand_in or v._base is stand_in for v in views):
        raise ConfigurationError(
            "model_sharded_state_dict",
            base.key,
            "must be saved as the parameter's own elements, so that its state can be saved alike",
            "Save without optimizer state (--no-save-optim)",
        )
    return built


def _pieces(param: Tensor, views: Iterable[ShardedTensor]) -> list[ShardedTensor]:
    """Return what one after another is all of a parameter, with stand-ins, or nothing.

    megatron-core saves fused down projections by the names that they have where they are apart.
    """
    stand_in = torch.empty(param.shape, dtype=param.dtype, device="meta")
    found, end = [], 0
    for piece in sorted(views, key=lambda piece: int(piece.data.storage_offset())):
        data = piece.data
        if not data.is_contiguous() or data.storage_offset() != param.storage_offset() + end:
            return []
        found.append(replace(piece, data=stand_in.as_strided(data.shape, data.stride(), end)))
        end += data.numel()
    return found if end == param.numel() else []


def _box(shard: ShardedTensor) -> Box:
    """Return a shard with strides of the flattened local parameter, and nothing prepended."""
    data = shard.data
    assert data is not None
    ones = (1,) * shard.prepend_axis_num
    sharded = replace(
        shard,
        data=None,
        local_shape=ones + tuple(shard.local_shape),
        # a fragment's boxes are no regular grid
        axis_fragmentations=None,
        prepend_axis_num=0,
    )
    return Box(sharded, data.storage_offset(), (*(data.numel() for _ in ones), *data.stride()))
