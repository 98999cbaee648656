"""Map the elements of a parameter to a checkpoint, and flat fragments to boxes.

A checkpoint has a tensor in the unsharded parameter's shape for every kind of state. A fragment of
a flattened parameter covers a few boxes of it: the rest of a first row, whole rows, the start of a
last row. Each box is saved and read separately. So saving gathers nothing, loading reads only what
it needs, and checkpoints do not depend on the layout of the run.
"""

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.place import row_cut
from megatron_eopt.checkpoint.keys import state_key, tensors, unstacked_key
from megatron_eopt.checkpoint.rows import LocalRows, RowGrid, param_of, with_plain_data

type _Cut = tuple[tuple[int, ...], tuple[int, ...]]

type Box = tuple[ShardedTensor, tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]
"""The model's entry; sizes, and offset in the checkpoint's tensor; first element and strides in the
flat local values."""


class ParameterSpace:
    """The place of a parameter's elements in checkpoints.

    Args:
        key: The model's key for the parameter.
        held: The local parameter.
        pieces: The entries under which the model saves it.
    """

    def __init__(self, key: str, held: Tensor, pieces: Sequence[ShardedTensor]) -> None:
        self._pieces = pieces
        # pieces are views of this tensor, whose offsets count from its storage's first element
        self._first = held.storage_offset()
        self.sharded = pieces[0]  # global shape and replica id are the same for all pieces
        # keys of the model's tensors that contain it
        self.keys = tuple(dict.fromkeys(piece.key for piece in pieces))
        # number of leading dimensions that index layers or experts, and the indices there
        self.prepended = pieces[0].prepend_axis_num
        self.places = tuple(pieces[0].global_offset[: self.prepended])
        self.key = key  # of its stack, if it is a layer or an expert of one
        self.name = unstacked_key(key, self.places)  # unique in the model

    def pieces(
        self, kind: str, flat: Tensor, start: int, replica: tuple[int, ...]
    ) -> Iterator[ShardedTensor]:
        """Yield the boxes of a kind of state, as views of its local values.

        Args:
            kind: The kind of state.
            flat: Its values for the elements of the flattened parameter from ``start`` on.
            start: Index of the first of these elements.
            replica: Replica id of the pieces.
        """
        for piece, shape, offset, first, strides in self.boxes(start, start + flat.numel()):
            yield ShardedTensor(
                state_key(kind, piece.key),
                # a view: a load writes to the state through it, and a save copies nothing
                flat.as_strided(shape, strides, flat.storage_offset() + first),
                flat.dtype,
                shape,
                piece.global_shape,
                offset,
                # boxes of fragments form no regular grid
                None,
                replica,
                allow_shape_mismatch=piece.allow_shape_mismatch,
            )

    def has_first(self, start: int, stop: int) -> bool:
        """Whether the first element of the unsharded parameter is in a local range."""
        # the offset in the whole parameter is 0, without the index of its layer or expert
        return any(not any(box[2][self.prepended :]) for box in self.boxes(start, stop))

    def boxes(self, start: int, stop: int) -> Iterator[Box]:
        """Yield the boxes that cover a range of the flattened local parameter."""
        for piece in self._pieces:
            data, ones = piece.data, (1,) * piece.prepend_axis_num
            strides = (*(data.numel() for _ in ones), *data.stride())
            # first index of the local range, counted from this entry's first element
            before = start - data.storage_offset() + self._first
            for part, shape in cut((*ones, *data.shape), strides, before, before + stop - start):
                offset = tuple(map(operator.add, piece.global_offset, part))
                yield piece, shape, offset, math.sumprod(part, strides) - before, strides


def parameter_spaces(
    model_state: Mapping[str, Any], params: Iterable[Tensor]
) -> dict[Tensor, ParameterSpace]:
    """Return the place of each model parameter in checkpoints.

    megatron-core saves some parameters in parts, and fused down projections under the names of the
    separate projections.

    Raises:
        ConfigurationError: If a parameter is not in the model's state, or is saved in another form.
    """
    parts: dict[int, list[tuple[str, ShardedTensor]]] = {}
    for item in nested_values(model_state):
        if isinstance(item, ShardedTensorFactory):
            built = with_plain_data(item).build()
            parts[id(param_of(item.data))] = [
                (item.key, part) for part in tensors({"built": built})
            ]
        elif isinstance(item, ShardedTensor) and item.data is not None:
            entry = with_plain_data(item)
            # a view also belongs to its base tensor
            bases = [item.data._base] if item.data._is_view() else []
            for owner in (param_of(item.data), *bases):
                parts.setdefault(id(owner), []).append((item.key, entry))
    spaces = {}
    for param in params:
        # a DTensor's entry has this tensor as data; to_local() returns another object
        held = param._local_tensor if isinstance(param, DTensor) else param
        found = sorted(parts.get(id(held), ()), key=lambda part: part[1].data.storage_offset())
        # tied weights are saved under two names
        found = [part for part in found if part[1].data.numel() == held.numel()][-1:] or found
        if not found:
            raise ConfigurationError(
                "model_sharded_state_dict",
                f"a parameter of shape {tuple(param.shape)}",
                "is stepped by the optimizer, but is not in the model's state",
                "Pass the wrapped model's sharded_state_dict(), which has the parameters "
                "themselves as data (keep_vars=True)",
            )
        key, pieces = found[0][0], [piece for _, piece in found]
        stored = held
        # an 8-bit weight is represented by a tensor without memory, see ``with_plain_data``
        if is_float8tensor(held):
            stored = pieces[0].data if pieces[0].data._base is None else pieces[0].data._base
        if sum(piece.data.numel() for piece in pieces) != held.numel() or not all(
            piece.data.untyped_storage()._cdata == stored.untyped_storage()._cdata
            and list(piece.data.stride()) == sorted(piece.data.stride(), reverse=True)
            for piece in pieces
        ):
            raise ConfigurationError(
                "model_sharded_state_dict",
                key,
                "must be saved as views of the parameter, in order, so that optimizer state can be "
                "saved in the same form",
                "Save without optimizer state (--no-save-optim)",
            )
        if row_cut(held).size > 1:
            rows = LocalRows(held, pieces)
            # as if nothing had been cut
            uncut = RowGrid(1, 1, rows.count)
            pieces = rows.found_in(uncut, rows.count, stored.detach())
        spaces[param] = ParameterSpace(key, stored, pieces)
    return spaces


def cut(sizes: Sequence[int], strides: Sequence[int], start: int, stop: int) -> Iterator[_Cut]:
    """Yield the boxes ``(offset, lengths)`` of a strided view that cover a range of its storage.

    ``strides`` are descending, each at least the extent of all following dimensions. ``start`` and
    ``stop`` count storage elements, as strides do.
    """
    if 0 in sizes or not (start < stop and stop > 0):
        return
    if not sizes:
        if start <= 0:
            yield (), ()
        return
    (size, *inner_sizes), (stride, *inner_strides) = sizes, strides
    # from the first to the last element of a row; between rows there may be gaps
    extent = 1 + sum((n - 1) * s for n, s in zip(inner_sizes, inner_strides, strict=True))
    # rows of which the range has any element, and those that it covers completely
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
