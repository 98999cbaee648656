"""State in checkpoints: loaded at any layout, and into other optimizers than wrote it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import serialization

from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.checkpoint.matching import match
from megatron_eopt.checkpoint.migration import Policy

__all__ = ["CheckpointError", "load"]


def load(
    sharded_state_dict: dict[str, Any],
    folder: str | Path,
    *,
    fresh: Iterable[str] = (),
    momentum_from_adam: bool = False,
    **kwargs: Any,
) -> Any:
    """Load a checkpoint as ``dist_checkpointing.load`` does, once it is matched with what is asked.

    All ranks call this together; nothing is read into the state before all have agreed.

    Args:
        sharded_state_dict: What is asked for; optimizers' requests in it are adapted in place.
        folder: Holds the checkpoint.
        fresh: Kinds of optimizer state that need not match: fresh where the checkpoint lacks them,
            left out where it has more.
        momentum_from_adam: Whether Muon's momentum is read from Adam's first moment where the
            checkpoint has no momentum. Both are added to what the optimizers' configuration says.
        kwargs: Further arguments of ``dist_checkpointing.load``.

    Returns:
        What ``dist_checkpointing.load`` returns.

    Raises:
        CheckpointError: On every rank, if it has state that no optimizer asks for.
        ConfigurationError: On every rank, if an optimizer's state is missing.
    """
    match(sharded_state_dict, Path(folder), Policy(frozenset(fresh), momentum_from_adam))
    return serialization.load(sharded_state_dict, str(folder), **kwargs)
