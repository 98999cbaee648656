"""Load optimizer state at any parallel layout, also if another optimizer wrote the checkpoint."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import serialization

from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.checkpoint.matching import match
from megatron_eopt.optimizers.continuation import Policy

__all__ = ["CheckpointError", "load"]


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
        CheckpointError: If the metadata of the checkpoint cannot be read.
        ConfigurationError: If state is missing, or starts fresh in an optimizer that has stepped.
    """
    # before the load, which fails for a key that the checkpoint lacks
    match(sharded_state_dict, Path(folder), Policy(frozenset(fresh), momentum_from_adam))
    return serialization.load(sharded_state_dict, str(folder), **kwargs)
