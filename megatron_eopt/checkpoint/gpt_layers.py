"""Loading a GPTModel's checkpoint into a HybridModel, whose layers Megatron matches with GPT's.

The trainer renames what it asks for once everything has been asked for. Boxes of fragments have no
grid that it could rename, so the model's entries are renamed before the optimizer looks at them;
Megatron then finds nothing left to do.
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
"""Of the load in progress: which layers of the GPTModel the HybridModel's are."""


@around
def noting_layers(original: Function, *values: Any, **kwargs: Any) -> Any:
    """Wrap what the trainer matches the layers with, once for every load."""
    layers, loads_state = original(*values, **kwargs)
    _layers.set(layers if loads_state else None)
    return layers, loads_state


def forget_layers() -> None:
    """Let the next load be of any checkpoint."""
    _layers.set(None)


def name_as_in_checkpoint(model_state: Any) -> None:
    """Give the entries of a model's sharded state dict the names that the checkpoint has, in place.

    Raises:
        CheckpointError: If the model has layers that no GPTModel has.
    """
    layers = _layers.get()
    if layers is None:
        return
    if layers.fresh_init:
        numbers = ", ".join(map(str, sorted(layers.fresh_init)))
        rule = f"has no optimizer state of layers {numbers}, which no GPTModel has"
        way_out = "Load the weights alone (--no-load-optim)"
        raise CheckpointError("checkpoint", "of a GPTModel", rule, way_out)
    retarget_sharded_state_dict_to_gpt_checkpoint(model_state, layers)
