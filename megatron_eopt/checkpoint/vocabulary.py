"""Keeps the padding of a checkpoint's vocabulary, which Megatron pads anew for each TP size.

Rows of padding take part in the softmax, so the loss depends on their number. The trainer therefore
builds its model with the checkpoint's number. A model that has more rows than the checkpoint loads
copies of the last row. megatron-core would load zeros, whose logits are far above those of trained
padding.
"""

import functools
import logging
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.msc_utils import MultiStorageClientFeature
from megatron.core.utils import log_single_rank
from torch import Tensor

from megatron_eopt.base.agreement import CheckpointError, gather_unique
from megatron_eopt.base.log import inform
from megatron_eopt.base.wrapping import Function, around
from megatron_eopt.checkpoint.catalogue import Shapes
from megatron_eopt.checkpoint.files import (
    CONFIG,
    TRACKER,
    folder_name,
    read_common_state,
    read_tracker,
)
from megatron_eopt.checkpoint.guard.saves import whole

logger = logging.getLogger(__name__)

type Change = tuple[int, int]
"""Rows in the checkpoint, and in this run."""


@around
def keeping_padding(
    original: Function, tokens: int, args: Any, logging_enabled: bool = True
) -> int:
    """Pad to the size of the checkpoint that the trainer will load, and as TP demands.

    Megatron's size stays if the tokenizer has more tokens than the checkpoint has rows, or if the
    run pads to multiples of another number. ``--padded-vocab-size`` takes precedence over both.
    """
    padded: int = original(tokens, args, logging_enabled)
    # where the trainer looks, in this order
    folders = [getattr(args, name, None) for name in ("load", "pretrained_checkpoint")]
    saved = next(filter(None, (_saved_args(folder, args) for folder in folders if folder)), None)
    rows = getattr(saved, "padded_vocab_size", None) or 0
    divisor = args.make_vocab_size_divisible_by
    if rows < tokens or getattr(saved, "make_vocab_size_divisible_by", divisor) != divisor:
        return padded
    size = args.tensor_model_parallel_size
    kept: int = -(-rows // size) * size
    if kept != padded and logging_enabled and args.rank == 0:
        text = f"the vocabulary keeps the padding of the checkpoint, {kept} rows"
        inform(logger, f"{text}; --padded-vocab-size {padded} pads it anew")
    return kept


def _saved_args(folder: str, args: Any) -> Any:
    """Return the arguments in a checkpoint; None if it cannot be read, which its load reports."""
    if MultiStorageClientFeature.is_enabled():
        return None
    try:
        step = getattr(args, "ckpt_step", None) or read_tracker(Path(folder, TRACKER))
        place = whole(Path(folder, folder_name(step)))
        if not (place / CONFIG).exists():
            return None
        return read_common_state(place).get("args", Namespace())
    except (CheckpointError, FileNotFoundError):
        return None


def fill_new_rows(state: Any, shapes: Shapes, known: Iterable[Change] = ()) -> None:
    """Let new rows of vocabularies be loaded as copies of the checkpoint's last row; collective.

    That row usually is padding. This holds for weights, main weights and optimizer state.

    Args:
        state: What ``dist_checkpointing`` is going to load; changed in place.
        shapes: Global shapes of the checkpoint's tensors.
        known: Changes of entries that are adapted already.
    """
    changes: dict[Change, None] = dict.fromkeys(known)

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
        text += f". To keep the size and the loss, pass --padded-vocab-size {saved}"
    return text
