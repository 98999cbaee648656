"""Keeps the padding of a checkpoint's vocabulary, which Megatron pads anew for each TP size.

Rows of padding take part in the softmax, so the loss depends on their number. The trainer therefore
builds its model with the checkpoint's number. A model that has more rows than the checkpoint loads
copies of the last row. megatron-core would load zeros, whose logits are far above those of trained
padding.
"""

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.msc_utils import MultiStorageClientFeature

from megatron_eopt.base.agreement import CheckpointError, gather_unique
from megatron_eopt.base.log import inform, warn
from megatron_eopt.base.wrapping import Function, around
from megatron_eopt.checkpoint.catalogue import Shapes
from megatron_eopt.checkpoint.common_state import read_common_state
from megatron_eopt.checkpoint.sources import assemble, tensor_sources
from megatron_eopt.guard.contents import (
    CONFIG,
    TRACKER,
    folder_name,
    read_tracker,
)
from megatron_eopt.guard.saves import whole

logger = logging.getLogger(__name__)


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
    as_saved: int = -(-rows // size) * size
    if as_saved != padded and logging_enabled and args.rank == 0:
        text = f"the vocabulary keeps the padding of the checkpoint, {as_saved} rows"
        inform(logger, f"{text}; --padded-vocab-size {padded} pads it anew")
    return as_saved


def _saved_args(folder: str, args: Any) -> Any:
    """Return the arguments in a checkpoint; None if it cannot be read, which its load reports."""
    if MultiStorageClientFeature.is_enabled():
        return None
    try:
        step = getattr(args, "ckpt_step", None) or read_tracker(Path(folder, TRACKER))
        checkpoint = whole(Path(folder, folder_name(step)))
        if not (checkpoint / CONFIG).exists():
            return None
        return read_common_state(checkpoint).get("args", Namespace())
    except (CheckpointError, FileNotFoundError):
        return None


def fill_new_rows(state: Any, shapes: Shapes) -> None:
    """Let new rows of vocabularies be loaded as copies of the checkpoint's last row; collective.

    That row usually is padding. This holds for weights, main weights and optimizer state.

    Args:
        state: What ``dist_checkpointing`` is going to load; changed in place.
        shapes: Global shapes of the checkpoint's tensors.
    """
    changes: dict[tuple[int, int], None] = {}  # rows in the checkpoint, and in this run

    def filled(item: Any) -> Any:
        if not (isinstance(item, ShardedTensor) and item.allow_shape_mismatch):
            return item
        saved, wanted = shapes.get(item.key), tuple(item.global_shape)
        if saved is None or saved == wanted:
            return item
        if (reading := assemble(item, tensor_sources(item.key, saved, item))) is None:
            return item
        changes[saved[0], wanted[0]] = None
        return reading

    dict_list_map_inplace(filled, state)
    for saved, wanted in gather_unique(changes):
        warn(logger, _text(saved, wanted))


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
