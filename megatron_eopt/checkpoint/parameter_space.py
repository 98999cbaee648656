"""Where a parameter's elements lie in a checkpoint, and which boxes a flat fragment covers there.

A checkpoint holds a tensor of the unsharded parameter's shape for every kind of state. A fragment
of a flattened parameter is no box of that tensor, but a few boxes together: the rest of a first
row, whole rows, the start of a last one. Each is saved, and read, by itself. So nothing is gathered
to be saved, nothing superfluous is read, and the layout of the run does not show in the checkpoint.
"""

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.checkpoint.keys import key_apart, tensors

type _Cut = tuple[tuple[int, ...], tuple[int, ...]]


class Box(NamedTuple):
    """Part of a stored tensor, or of a whole local parameter, that is a box of a checkpoint's."""

    piece: ShardedTensor  # what the model saves it as part of
    shape: tuple[int, ...]  # the box's, with a dimension for each of the checkpoint's tensor
    offset: tuple[int, ...]  # its first element in that tensor
    start: int  # the first element, in the flattened stored tensor
    strides: tuple[int, ...]  # elements of it between neighbours, for each dimension of the box

    def holding(self, flat: Tensor, key: str, replica: tuple[int, ...]) -> ShardedTensor:
        """Return the box of a stored tensor, which is flat, without copying it."""
        return ShardedTensor(
            key,
            flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.start),
            flat.dtype,
            self.shape,
            self.piece.global_shape,
            self.offset,
            # a fragment's boxes are no regular grid
            None,
            replica,
            allow_shape_mismatch=self.piece.allow_shape_mismatch,
        )


class ParameterSpace:
    """Where the elements of a parameter lie.

    Args:
        key: What the model saves it as.
        held: What this rank stores of it.
        pieces: The parts of it that the model saves.
    """

    def __init__(self, key: str, held: Tensor, pieces: Sequence[ShardedTensor]) -> None:
        self._pieces = pieces
        self._first = held.storage_offset()
        self.sharded = pieces[0]  # has what all have in common: whole shape, replica
        # names of the checkpoint's tensors that it is part of, without optimizer prefixes
        self.keys = tuple(dict.fromkeys(piece.key for piece in pieces))
        # leading dimensions of the checkpoint's tensor that number layers or experts, which may
        # share a key: its places there tell them apart
        self.prepended = pieces[0].prepend_axis_num
        self.places = tuple(pieces[0].global_offset[: self.prepended])
        self.name = key_apart(key, self.places)  # unique in the model

    def boxes(self, start: int, stop: int) -> Iterator[Box]:
        """Yield the boxes of the elements ``start`` to ``stop`` of the flattened parameter."""
        for piece in self._pieces:
            data, ones = piece.data, (1,) * piece.prepend_axis_num
            strides = (*(data.numel() for _ in ones), *data.stride())
            before = start - data.storage_offset() + self._first
            for part, shape in cut((*ones, *data.shape), strides, before, before + stop - start):
                offset = tuple(map(operator.add, piece.global_offset, part))
                yield Box(piece, shape, offset, math.sumprod(part, strides) - before, strides)


def parameter_spaces(
    model_state: Mapping[str, Any], params: Iterable[Tensor]
) -> dict[Tensor, ParameterSpace]:
    """Return where each of the model's parameters lies in a checkpoint.

    megatron-core saves some in parts, and fused down projections by the names that they have where
    they are apart.

    Raises:
        ConfigurationError: If a parameter is not in the model's state, or is saved as something
            else than its own elements.
    """
    parts: dict[int, list[tuple[str, ShardedTensor]]] = {}
    for item in nested_values(model_state):
        if isinstance(item, ShardedTensorFactory):
            parts[id(item.data)] = [(item.key, part) for part in tensors({"built": item.build()})]
        elif isinstance(item, ShardedTensor) and item.data is not None:
            # of a view the whole that it is a part of
            for owner in (item.data, *([item.data._base] if item.data._is_view() else ())):
                parts.setdefault(id(owner), []).append((item.key, item))
    spaces = {}
    for param in params:
        # of a DTensor the entry holds this tensor; to_local() returns another one
        held = param._local_tensor if isinstance(param, DTensor) else param
        found = sorted(parts.get(id(held), ()), key=lambda part: part[1].data.storage_offset())
        # tied weights are there by two names
        found = [part for part in found if part[1].data.numel() == held.numel()][-1:] or found
        if not found:
            raise ConfigurationError(
                "model_sharded_state_dict",
                f"a parameter of shape {tuple(param.shape)}",
                "is stepped by the optimizer and is not in the model's state",
                "Build it from the wrapped model with sharded_state_dict(), which keeps the "
                "parameters themselves (keep_vars=True)",
            )
        key, pieces = found[0][0], [piece for _, piece in found]
        if sum(piece.data.numel() for piece in pieces) != held.numel() or not all(
            piece.data.untyped_storage()._cdata == held.untyped_storage()._cdata
            and list(piece.data.stride()) == sorted(piece.data.stride(), reverse=True)
            for piece in pieces
        ):
            raise ConfigurationError(
                "model_sharded_state_dict",
                key,
                "must be saved as the parameter's own elements, in their order, so that its state "
                "can be saved alike",
                "Save without optimizer state (--no-save-optim)",
            )
        spaces[param] = ParameterSpace(key, held, pieces)
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
