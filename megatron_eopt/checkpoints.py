"""Load optimizer state at any parallel layout, also if another optimizer wrote the checkpoint.

All files are checked before a load. :func:`save` lets a load also tell files of another save.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import serialization

from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.checkpoint.files import check_all, note_fingerprints
from megatron_eopt.checkpoint.matching import match
from megatron_eopt.optimizers.continuation import Policy

__all__ = ["CheckpointError", "load", "save"]


def save(sharded_state_dict: dict[str, Any], folder: str | Path, **kwargs: Any) -> Any:
    """Save a checkpoint; replaces ``dist_checkpointing.save``, with the same arguments.

    A small file more, ``fingerprints.json``, says which files belong together.

    Returns:
        None, or the request of an asynchronous save.
    """
    request = serialization.save(sharded_state_dict, str(folder), **kwargs)
    if request is None:
        note_fingerprints(Path(folder))
    else:
        request.add_finalize_fn(lambda: note_fingerprints(Path(folder)))
    return request


def load(
    sharded_state_dict: dict[str, Any],
    folder: str | Path,
    *,
    fresh: Iterable[str] = (),
    momentum_from_adam: bool = False,
    **kwargs: Any,
) -> Any:
    """Load a checkpoint; replaces ``dist_checkpointing.load``.

    Optimizer state is first matched with the checkpoint, by parameter and kind of state. All ranks
    must call this together, and errors are raised on every rank before any state is read.

    Args:
        sharded_state_dict: What to load. For the optimizer, pass the result of its
            ``sharded_state_dict(model_state, is_loading=True)``. It is changed in place.
        folder: Folder of one iteration, in the format ``torch_dist``.
        fresh: Kinds of optimizer state, such as ``"exp_avg"``, that start fresh if the checkpoint
            lacks them; in addition to the configuration's ``ckpt_allow_missing_optim_state``.
        momentum_from_adam: Whether Muon's momentum starts as Adam's first moment if the checkpoint
            has no momentum; also on if the configuration sets ``checkpoint_momentum_from_adam``.
        kwargs: Other arguments of ``dist_checkpointing.load``.

    Returns:
        What ``dist_checkpointing.load`` returns: the state dict to pass to ``load_state_dict``.

    Raises:
        CheckpointError: If a file of the checkpoint is missing, damaged or of another save.
        ConfigurationError: If state is missing, or starts fresh in an optimizer that has stepped.
    """
    check_all(Path(folder))
    # before the load, which fails for a key that the checkpoint lacks
    match(sharded_state_dict, Path(folder), Policy(frozenset(fresh), momentum_from_adam))
    return serialization.load(sharded_state_dict, str(folder), **kwargs)
