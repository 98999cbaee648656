"""Builds the optimizers of parameters that are not matrices: Adam, SGD or Lion.

As in megatron-core, Transformer Engine's fused classes are used if they are installed, else NVIDIA
Apex's, else torch's.
"""

from typing import Any

import torch
from emerging_optimizers.scalar_optimizers import Lion
from megatron.core import optimizer as megatron_optimizer
from torch._guards import detect_fake_mode

from megatron_eopt.base.names import CAUTIOUS_DECAY, FIRST_MOMENT, MOMENTUM
from megatron_eopt.config.arguments import scalar_arguments
from megatron_eopt.config.registry import init_state
from megatron_eopt.config.settings import Settings
from megatron_eopt.optimizers.element_wise import Adam, AdamW
from megatron_eopt.optimizers.update_rule import InitState, empty_states, zeros

_FUSED = {megatron_optimizer.Adam, megatron_optimizer.SGD}
"""Classes of Transformer Engine or Apex if one is installed, else torch's."""

ELEMENT_WISE_CLASSES = _FUSED | {
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD),
    *(Adam, AdamW),
}
"""Classes that update each element independently."""


def build_scalar_optimizer(
    name: str, settings: Settings, groups: list[dict[str, Any]], *, plain: bool, **arguments: Any
) -> torch.optim.Optimizer:
    """Return Adam, SGD or Lion.

    Args:
        name: Its name.
        settings: The configuration.
        groups: Parameter groups.
        plain: Whether to use torch's classes, for tensors that fused kernels do not support.
        **arguments: Constructor arguments that take the place of the configuration's.
    """
    kwargs = scalar_arguments(name, settings)
    decoupled = settings.config.decoupled_weight_decay
    if name == "lion":
        kwargs["weight_decay_method"] = "decoupled" if decoupled else "l2"
        # torch has no Lion; this is also the class that megatron-core builds
        lion: torch.optim.Optimizer = Lion(groups, **kwargs | arguments)
        return lion
    is_fused = not (plain or megatron_optimizer.USING_PYTORCH_OPTIMIZER)
    # other classes have no such weight decay
    cautious = settings.config.cautious_weight_decay
    is_ours = name == "adam" and (cautious or (settings.config.fused_adam and not is_fused))
    if is_ours:
        kwargs |= {"fused": True, CAUTIOUS_DECAY: cautious}
    elif detect_fake_mode() is not None and not (is_fused or plain):
        # on GPU tensors torch chooses this by itself, but not on fake ones
        kwargs["foreach"] = True
    kwargs |= arguments
    optimizer: torch.optim.Optimizer
    if name == "sgd":
        optimizer = (megatron_optimizer.SGD if is_fused else torch.optim.SGD)(groups, **kwargs)
    elif is_ours:
        optimizer = (AdamW if decoupled else Adam)(groups, **kwargs)
    elif is_fused:
        optimizer = megatron_optimizer.Adam(groups, **{"adam_w_mode": decoupled, **kwargs})
    else:
        # bit-equal to megatron-core with the same configuration
        optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)(groups, **kwargs)
    return optimizer


def scalar_init_of(optimizer: torch.optim.Optimizer) -> InitState:
    """Return the function that creates the state of Adam, SGD or Lion, unless its rule does."""
    if isinstance(optimizer, Lion):
        return init_state
    if megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        return None
    fused = {
        megatron_optimizer.SGD: _init_fused_sgd,
        megatron_optimizer.Adam: zeros(FIRST_MOMENT, "exp_avg_sq"),
    }
    return fused.get(type(optimizer))


def _init_fused_sgd(opt: Any, config: Any = None) -> None:
    # without momentum there is no buffer
    moving = {id(p) for group in opt.param_groups if group["momentum"] for p in group["params"]}
    for state, param in empty_states(opt):
        if id(param) in moving:
            state[MOMENTUM] = torch.zeros_like(param.data)
