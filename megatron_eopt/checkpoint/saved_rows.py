"""Loads the rows of the model's weights from where a checkpoint has them.

megatron-core reads them from the same places at every size of weight rematerialization, see
:mod:`~megatron_eopt.checkpoint.rows`. At another size than that of the run that wrote them, these
are other rows, or padding.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.base.place import remat_size
from megatron_eopt.checkpoint.catalogue import Catalogue
from megatron_eopt.checkpoint.keys import split_key, tensors
from megatron_eopt.checkpoint.rows import LocalRows, RowGrid, param_of, with_plain_data
from megatron_eopt.checkpoint.vocabulary import Change
from megatron_eopt.routing.parameters import cut_dimension

_VOCABULARY = ("word_embeddings.", "output_layer.")
_NORMS = ("layernorm.", "layer_norm_weight")
_ROW_PARALLEL = ("linear_proj.weight", "linear_fc2.weight", "out_proj.weight")
"""Each transformer or Mamba layer has these."""


class SavedRows:
    """How the run that wrote a checkpoint has cut the rows of the model's weights.

    Args:
        catalogue: What the checkpoint has.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._shapes = catalogue.shapes
        self._vocabulary = getattr(catalogue.common.get("args"), "padded_vocab_size", None)
        of_model = (item for item in catalogue.values.items() if item[1].kind is None)
        self._cuts = cuts = {key: value.cuts for key, value in of_model if value.cuts}
        # only FSDP cuts norms, and it saves rows in their order
        self._in_order = any(sizes[-1:] > (1,) for key, sizes in cuts.items() if _has(key, _NORMS))
        # sizes of rematerialization and tensor parallelism, which cut rows and columns of these
        # weights; others may be cut for reasons of their own
        self._sizes = {False: (1, 1), True: (1, 1)}
        for key, sizes in cuts.items():
            if key.endswith(_ROW_PARALLEL):
                size, slabs = map(max, self._sizes[_is_of_experts(key)], (1, 1, *sizes)[-2:])
                self._sizes[_is_of_experts(key)] = size, slabs
        self.changes: dict[Change, None] = {}  # of the vocabulary's size

    def find(self, state: Any) -> None:
        """Let the model's entries ask for rows where they are, in place.

        Raises:
            CheckpointError: If the checkpoint does not say where they are.
        """
        dict_list_map_inplace(self._corrected, state)

    def _corrected(self, item: Any) -> Any:
        """Return an entry that reads the right rows: this one, if it does."""
        data = getattr(item, "data", None)
        if not isinstance(item, ShardedTensor | ShardedTensorFactory) or split_key(item.key):
            return item
        if data is None or data.dim() != 2 or isinstance(data, DTensor):
            return item
        param = param_of(data)
        if remat_size(param) == 1 == self._sizes[_is_of_experts(item.key)][0]:
            return item  # cut neither here nor there, as almost always
        parts = list(tensors({"built": with_plain_data(item)}))
        # sections of unequal size are saved uncut, and other factories have their own order of rows
        section = (len(data) // max(len(parts), 1), data.shape[1])
        are_even = all(
            part.local_shape == section
            and part.axis_fragmentations
            and len(self._cuts.get(part.key, ())) == len(part.global_shape)
            for part in parts
        )
        if not (parts and are_even and data.numel()):
            return item
        rows = LocalRows(param, parts)
        grid = self._grid_of(rows, param)
        if grid is None:
            return item
        return _reading(item, rows, grid, self._count(rows, grid))

    def _grid_of(self, rows: LocalRows, param: Tensor) -> RowGrid | None:
        """Return how rows are cut in the checkpoint; None if megatron-core reads the right ones."""
        key, sections = rows.parts[0].key, len(rows.parts)
        # gate and up together, whether they are in one tensor or not
        height = (self._shapes[key] or ())[rows.axis] * sections // rows.per_key
        cuts = self._cuts[key][rows.axis]
        if self._in_order or cuts == 1 or (sections == 1 and height == rows.count):
            is_in_order = sections == 1 and height == rows.count == rows.grid.rows
            return None if rows.grid.pieces == 1 or is_in_order else RowGrid(1, 1, height)
        size, slabs = self._sizes[_is_of_experts(key)]
        # tensor parallelism always cuts the rows of gate and up
        slabs = slabs if sections > 1 or cut_dimension(param) == 0 else 1
        pieces, odd = divmod(cuts, rows.per_key * slabs)
        is_known = not odd and pieces in (1, size)
        if rows.grid.pieces == 1 and (pieces == 1 or not is_known):
            return None
        if not is_known:
            raise _unknown(key)
        grid = RowGrid(slabs, pieces, height // (slabs * pieces))
        return None if grid == rows.grid else grid

    def _count(self, rows: LocalRows, grid: RowGrid) -> int:
        """Return the number of a weight's rows in the checkpoint, without padding."""
        key = rows.parts[0].key
        count: int = rows.count
        if _has(key, _VOCABULARY):
            saved = self._vocabulary or self._rows_of_state(key)
            count = grid.rows if grid.pieces == 1 else saved or count
        share, odd = divmod(count, grid.slabs * len(rows.parts))
        slab, has_padding = grid.rows // grid.slabs, grid.pieces > 1
        lacking = slab - share * len(rows.parts)
        if odd or lacking < 0 or (lacking and not has_padding):
            raise _unknown(key)
        if count != rows.count:
            self.changes[count, rows.count] = None
        return count

    def _rows_of_state(self, key: str) -> int | None:
        """Return the rows of a weight's optimizer state, which is saved without padding."""
        of_state = (n for n in self._shapes if split_key(n) and n.endswith(f".{key}"))
        return next((shape[0] for name in of_state if (shape := self._shapes[name])), None)


def _unknown(key: str) -> CheckpointError:
    rule = (
        "has rows that ranks of weight rematerialization have cut, at places that it does not say"
    )
    hint = "Load it with the parallel sizes and the vocabulary of the run that wrote it"
    return CheckpointError("checkpoint", key, rule, hint)


def _reading(
    item: ShardedTensor | ShardedTensorFactory, rows: LocalRows, grid: RowGrid, count: int
) -> ShardedTensorFactory:
    """Return an entry that reads each of this rank's rows from its place."""
    data = item.data.detach()
    if is_float8tensor(data):
        # megatron-core quantizes what is loaded
        data = torch.empty(data.shape, dtype=data.dtype, device=data.device)
    boxes = {}
    for number, piece in enumerate(rows.runs_in(grid, count, data)):
        # boxes that form no regular grid have all dimensions of the checkpoint's tensor
        stacked = piece.data.view((1,) * piece.prepend_axis_num + piece.local_shape)
        boxes[str(number)] = replace(
            piece,
            data=stacked,
            local_shape=tuple(stacked.shape),
            prepend_axis_num=0,
            allow_shape_mismatch=False,
        )
    # one entry that asks for several boxes, which are put together after the load
    merge = functools.partial(_merged, data)
    return ShardedTensorFactory(item.key, item.data, lambda *_: dict(boxes), merge, item.replica_id)


def _merged(data: Tensor, loaded: Mapping[str, Tensor]) -> Tensor:
    """Return the rows of all boxes, and zeros for padding."""
    end = 0
    for number in range(len(loaded)):
        box = loaded[str(number)].view(-1, data.shape[1])
        data[end : end + len(box)] = box
        end += len(box)
    data[end:] = 0
    return data


def _is_of_experts(key: str) -> bool:
    return ".experts." in key


def _has(key: str, words: Sequence[str]) -> bool:
    return any(word in key for word in words)
