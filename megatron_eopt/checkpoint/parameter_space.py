"""Map the elements of a parameter to a checkpoint, and flat fragments to boxes.

A checkpoint has a tensor in the unsharded parameter's shape for every kind of state. A fragment of
a flattened parameter covers a few boxes of it: the rest of a first row, whole rows, the start of a
last row. Each box is saved and read separately. So saving gathers nothing, loading reads only what
it needs, and checkpoints do not depend on the layout of the run.
"""

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.checkpoint.keys import state_key, tensors, unstacked_key
from megatron_eopt.checkpoint.sources import MatrixSource, Source
from megatron_eopt.config.registry import is_nonlinear_or_embedding
from megatron_eopt.layouts.boxes import Box, cut
from megatron_eopt.matrices import Split
from megatron_eopt.routing.parameters import cut_dimension
from megatron_eopt.storage.shard import Fragment, fragment_layouts

type StoredBox = tuple[ShardedTensor, tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]
"""The model's entry; sizes, and offset in the checkpoint's tensor; first element and strides in the
flat local values."""


class ParameterSpace:
    """The place of a parameter's elements in checkpoints.

    Args:
        key: The model's key for the parameter.
        local: The local parameter.
        pieces: The entries under which the model saves it.
        is_matrix: Whether megatron-core gives the parameter to the main optimizer, such as Muon.
    """

    def __init__(
        self, key: str, local: Tensor, pieces: Sequence[ShardedTensor], *, is_matrix: bool
    ) -> None:
        self._pieces = pieces
        self.is_matrix = is_matrix
        # pieces are views of this tensor, whose offsets count from its storage's first element
        self._first = local.storage_offset()
        self.sharded = pieces[0]  # global shape and replica id are the same for all pieces
        # keys of the model's tensors that contain it
        self.keys = tuple(dict.fromkeys(piece.key for piece in pieces))
        # number of leading dimensions that index layers or experts, and the index there
        self.prepended = pieces[0].prepend_axis_num
        self.stack_index = tuple(pieces[0].global_offset[: self.prepended])
        self.key = key  # of its stack, if it is a layer or an expert of one
        self.name = unstacked_key(key, self.stack_index)  # unique in the model

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

    def boxes(self, start: int, stop: int) -> Iterator[StoredBox]:
        """Yield the boxes that cover a range of the flattened local parameter."""
        for piece in self._pieces:
            data, ones = piece.data, (1,) * piece.prepend_axis_num
            strides = (*(data.numel() for _ in ones), *data.stride())
            # first index of the local range, counted from this entry's first element
            before = start - data.storage_offset() + self._first
            for part, shape in cut((*ones, *data.shape), strides, before, before + stop - start):
                offset = tuple(map(operator.add, piece.global_offset, part))
                yield piece, shape, offset, math.sumprod(part, strides) - before, strides

    def _sections(self, param: Tensor) -> list[Source]:
        """Return the boxes that the parameter consists of without tensor parallelism."""
        boxes, dim = list(self.boxes(0, param.numel())), cut_dimension(param)
        sections = []
        begin: dict[str, int] = {}  # of the next section of each tensor
        for piece, sizes, offset, _, _ in boxes:
            shape, start = list(sizes), list(offset)
            if dim != -1:
                axis = dim - param.dim()
                local_size = sum(box[1][axis] for box in boxes if box[0].key == piece.key)
                shape[axis] = sizes[axis] * (piece.global_shape[axis] // local_size)
                start[axis] = begin.get(piece.key, 0)
                begin[piece.key] = start[axis] + shape[axis]
            box = Box((0,) * len(shape), tuple(shape))
            sections.append(Source(piece.key, tuple(piece.global_shape), box, tuple(start)))
        return sections

    def matrices(self, param: Tensor, split: Split) -> Iterator[MatrixSource]:
        """Yield the boxes of all logical matrices of a parameter of two dimensions."""
        sections, axis = self._sections(param), max(cut_dimension(param), 0)
        fragment = Fragment(0, 0, math.prod(split.shape))
        size = sum(section.box.shape[axis - 2] for section in sections) if param.dim() == 2 else 0
        if len(split.shape) != 2 or split.shape[axis] != size:
            return
        layouts = fragment_layouts(split, -1, 1, [fragment])
        start = 0  # of a section, in the dimension in which they follow one another
        for section in sections:
            *lead, height, width = section.box.shape
            corner = (start, 0) if axis == 0 else (0, start)
            start += section.box.shape[axis - 2]
            section_box = Box(corner, (height, width))
            for number, layout in enumerate(layouts):
                for offset, row, column, *sides in zip(
                    *(getattr(layout.boxes, name).tolist() for name in _COLUMNS), strict=True
                ):
                    begin = divmod(offset, split.cols)
                    part = section_box.clip(Box(begin, tuple(sides)))
                    if part is None:
                        continue
                    inside = map(operator.sub, part.offset, begin)
                    moved = map(operator.sub, part.offset, corner)
                    yield MatrixSource(
                        self.name,
                        (number, len(layouts)),
                        layout.shape,
                        Source(
                            section.key,
                            section.global_shape,
                            Box(tuple(map(operator.add, (row, column), inside)), part.shape),
                            (
                                *section.global_offset[: len(lead)],
                                *map(operator.add, section.global_offset[len(lead) :], moved),
                            ),
                        ),
                    )


_COLUMNS = ("offset", "row", "column", "height", "width")


def parameter_spaces(
    model_state: Mapping[str, Any], params: Iterable[Tensor]
) -> dict[Tensor, ParameterSpace]:
    """Return the place of each model parameter in checkpoints.

    megatron-core saves some parameters in parts, and fused down projections under the names of the
    separate projections.

    Raises:
        ConfigurationError: If a parameter is not in the model's state, or is saved in another form.
    """
    entries_of: dict[int, list[tuple[str, ShardedTensor]]] = {}
    for item in nested_values(model_state):
        if isinstance(item, ShardedTensorFactory):
            built = with_plain_data(item).build()
            entries_of[id(param_of(item.data))] = [
                (item.key, part) for part in tensors({"built": built})
            ]
        elif isinstance(item, ShardedTensor) and item.data is not None:
            entry = with_plain_data(item)
            # a view also belongs to its base tensor
            bases = [item.data._base] if item.data._is_view() else []
            for owner in (param_of(item.data), *bases):
                entries_of.setdefault(id(owner), []).append((item.key, entry))
    spaces = {}
    for param in params:
        # a DTensor's entry has this tensor as data; to_local() returns another object
        local = param._local_tensor if isinstance(param, DTensor) else param
        parts = sorted(
            entries_of.get(id(local), ()), key=lambda part: part[1].data.storage_offset()
        )
        # tied weights are saved under two names
        parts = [part for part in parts if part[1].data.numel() == local.numel()][-1:] or parts
        if not parts:
            raise ConfigurationError(
                "model_sharded_state_dict",
                f"a parameter of shape {tuple(param.shape)}",
                "is stepped by the optimizer, but is not in the model's state",
                "Pass the wrapped model's sharded_state_dict(), which has the parameters "
                "themselves as data (keep_vars=True)",
            )
        key, pieces = parts[0][0], [piece for _, piece in parts]
        stored = local
        # an 8-bit weight is represented by a tensor without memory, see ``with_plain_data``
        if is_float8tensor(local):
            stored = pieces[0].data if pieces[0].data._base is None else pieces[0].data._base
        if sum(piece.data.numel() for piece in pieces) != local.numel() or not all(
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
        is_matrix = not is_nonlinear_or_embedding(param)
        spaces[param] = ParameterSpace(key, stored, pieces, is_matrix=is_matrix)
    return spaces


def param_of(data: Tensor) -> Tensor:
    """Return the parameter that the data of a model's entry belongs to."""
    param: Tensor = getattr(data, "_gtp_dequant_src", data)
    return param


def with_plain_data[T: (ShardedTensor, ShardedTensorFactory)](item: T) -> T:
    """Return an entry with data without memory if it is an 8-bit weight, which has no views."""
    if not is_float8tensor(item.data):
        return item
    return replace(item, data=torch.empty(item.data.shape, dtype=item.data.dtype, device="meta"))
