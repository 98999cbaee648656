"""Loads a vocabulary that is padded to another size, because padding depends on TP.

megatron-core would fill new rows with zeros. Their logits are then zero, which is far above those
of trained padding, and the loss rises.
"""

import functools
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.utils import log_single_rank
from torch import Tensor

from megatron_eopt.base.agreement import gather_unique
from megatron_eopt.checkpoint.contents import Shapes

logger = logging.getLogger(__name__)

type _Change = tuple[int, int]
"""Rows in the checkpoint, and in this run."""


def fill_new_rows(state: Any, shapes: Shapes) -> None:
    """Let new rows of vocabularies be loaded as copies of the checkpoint's last row; collective.

    That row usually is padding. This holds for weights, main weights and optimizer state.

    Args:
        state: What ``dist_checkpointing`` is going to load; changed in place.
        shapes: Global shapes of the checkpoint's tensors.
    """
    changes: dict[_Change, None] = {}

    def adapted(item: Any) -> Any:
        # megatron-core sets this on tensors with a row for each token only
        if not (isinstance(item, ShardedTensor) and item.allow_shape_mismatch):
            return item
        saved, wanted = shapes.get(item.key), tuple(item.global_shape)
        if saved is None or saved == wanted or saved[1:] != wanted[1:]:
            return item
        changes[saved[0], wanted[0]] = None
        # other ranks' pieces of this tensor get an irregular form, too
        item = replace(item, axis_fragmentations=None)
        # a factory lets one entry ask for several pieces, and merges them after the load
        build = functools.partial(_with_last_row, item, saved[0])
        merge = functools.partial(_filled, first=saved[0] - item.global_offset[0])
        return ShardedTensorFactory(item.key, item.data, build, merge, item.replica_id)

    dict_list_map_inplace(adapted, state)
    for saved, wanted in gather_unique(changes):
        log_single_rank(logger, logging.WARNING, _text(saved, wanted))


def _with_last_row(item: ShardedTensor, saved: int, *_: Any) -> dict[str, ShardedTensor]:
    """Return a piece, with the checkpoint's last row if the piece has new rows."""
    pieces = {"rows": item}
    if item.global_offset[0] + item.local_shape[0] > saved:
        shape = (1, *item.local_shape[1:])
        offset = (saved - 1, *item.global_offset[1:])
        data = item.data.new_empty(shape)
        pieces["last"] = replace(item, data=data, local_shape=shape, global_offset=offset)
    return pieces


def _filled(loaded: Mapping[str, Tensor], *, first: int) -> Tensor:
    rows = loaded["rows"]
    if "last" in loaded:
        # all of this rank's rows may be new, and then the first one counts as 0
        rows[max(0, first) :] = loaded["last"]
    return rows


def _text(saved: int, wanted: int) -> str:
    text = f"the vocabulary is padded to {wanted} rows, and to {saved} in the checkpoint"
    if wanted > saved:
        text += f". The {wanted - saved} new rows start as copies of the last one"
    else:
        text += f". The last {saved - wanted} rows are dropped"
    size = parallel_state.get_tensor_model_parallel_world_size()
    if saved % size == 0:
        text += f". To keep the size, pass --make-vocab-size-divisible-by {saved // size}"
    return text
