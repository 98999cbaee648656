"""megatron-core's ``save`` and ``load`` of whole checkpoints, guarded."""

from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import serialization

from megatron_eopt.base.agreement import CheckpointError, from_rank_0
from megatron_eopt.checkpoint.matching import match
from megatron_eopt.guard.reads import checked
from megatron_eopt.guard.saves import absolute, begin, collecting_errors, replacing, whole


def save(sharded_state_dict: dict[str, Any], folder: str | Path, **kwargs: Any) -> Any:
    """Save a checkpoint; replaces ``dist_checkpointing.save``, with the same arguments.

    It replaces what the folder has when all is written, as :func:`replacing` does.

    Returns:
        None, or the request of an asynchronous save.

    Raises:
        CheckpointError: If the folder does not exist, its disk is full, or another run saves to it.
    """
    from_rank_0(lambda: _check_exists(absolute(folder)))
    if not kwargs.get("async_sharded_save"):
        with replacing(folder) as path:
            serialization.save(sharded_state_dict, str(path), **kwargs)
        return None
    unfinished = begin(folder)
    with collecting_errors():
        request = serialization.save(sharded_state_dict, str(unfinished.path), **kwargs)
    request.finalize_fns[:] = [partial(unfinished.finish_after, list(request.finalize_fns))]
    return request


def _check_exists(folder: Path) -> None:
    if not whole(folder).is_dir():
        raise CheckpointError("save", str(folder), "does not exist", "Create this folder first")


def load(sharded_state_dict: dict[str, Any], folder: str | Path, **kwargs: Any) -> Any:
    """Load a checkpoint; replaces ``dist_checkpointing.load``.

    Optimizer state is first matched with the checkpoint: it continues if the same optimizer wrote
    it, and starts fresh if another one did. All ranks must call this together, and errors are
    raised on every rank before any state is read.

    Args:
        sharded_state_dict: What to load. For the optimizer, pass the result of its
            ``sharded_state_dict(model_state, is_loading=True)``. It is changed in place.
        folder: Folder of one iteration, in the format ``torch_dist``.
        kwargs: Other arguments of ``dist_checkpointing.load``.

    Returns:
        What ``dist_checkpointing.load`` returns: the state dict to pass to ``load_state_dict``.

    Raises:
        CheckpointError: If a file of the checkpoint is missing, damaged or of another save, or if
            another save has replaced it meanwhile.
        ConfigurationError: If state is missing, is of an unknown optimizer, or would start fresh in
            an optimizer that has stepped.
    """
    with checked(folder) as place:
        # before the load, which fails for a key that the checkpoint lacks
        match(sharded_state_dict, place)
        return serialization.load(sharded_state_dict, str(place), **kwargs)
