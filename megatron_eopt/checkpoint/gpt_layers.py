"""Load a GPTModel's checkpoint into a HybridModel, whose layers Megatron matches with GPT's.

The trainer renames model and optimizer entries together, but cannot rename boxes of fragments,
which form no regular grid. So the model's entries are renamed first, and the optimizer's follow.
"""

from contextvars import ContextVar
from typing import Any

from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
    GPTCompatLayerMaps,
    retarget_sharded_state_dict_to_gpt_checkpoint,
)

from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.base.wrapping import Function, around

_layers: ContextVar[GPTCompatLayerMaps | None] = ContextVar("_layers", default=None)
"""For the load in progress: the GPTModel layer of each HybridModel layer."""


@around
def noting_layers(original: Function, *values: Any, **kwargs: Any) -> Any:
    """Wrap the trainer's function that matches layers, and store its result for this load."""
    layers, loads_state = original(*values, **kwargs)
    # the trainer calls this before it builds the state to load, and passes the result on to no
    # optimizer
    _layers.set(layers if loads_state else None)
    return layers, loads_state


def forget_layers() -> None:
    """Clear the layer map after a load."""
    _layers.set(None)


def name_as_in_checkpoint(model_state: Any) -> None:
    """Rename the entries of a model's sharded state dict to the checkpoint's names, in place.

    Raises:
        CheckpointError: If the model has layers that a GPTModel cannot have.
    """
    layers = _layers.get()
    if layers is None:
        return
    if layers.fresh_init:
        numbers = ", ".join(map(str, sorted(layers.fresh_init)))
        rule = f"has no optimizer state for layers {numbers}, which a GPTModel cannot have"
        hint = "Load only the weights (--no-load-optim)"
        raise CheckpointError("checkpoint", "of a GPTModel", rule, hint)
    retarget_sharded_state_dict_to_gpt_checkpoint(model_state, layers)
