"""Builds the optimizers of parameters that are not matrices: Adam, SGD or Lion."""

from typing import Any, NamedTuple

import torch
from torch._guards import detect_fake_mode

from megatron_eopt.base.names import CAUTIOUS_DECAY, FIRST_MOMENT, MOMENTUM
from megatron_eopt.config.arguments import scalar_arguments
from megatron_eopt.config.registry import entries, entry_of, init_state, path_of
from megatron_eopt.config.settings import Settings
from megatron_eopt.optimizers.element_wise import Adam, AdamW
from megatron_eopt.optimizers.update_rule import InitState, empty_states, zeros


class FusedClasses(NamedTuple):
    """Classes of Transformer Engine or Apex, which update all parameters in one kernel."""

    adam: Any
    sgd: Any


_ELEMENT_WISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, Adam, AdamW)


def is_element_wise(cls: type) -> bool:
    """Whether a class is known to update each element independently."""
    if cls in _ELEMENT_WISE or _is_fused(cls):
        return True
    path = f"{cls.__module__}.{cls.__qualname__}"
    registered = entries().values()
    return path in {path_of(e) for e in registered if e.state_layout == "element_wise"}


def _is_fused(cls: type) -> bool:
    package = cls.__module__.partition(".")[0]
    return package in ("transformer_engine", "apex") and cls.__name__ in ("FusedAdam", "FusedSGD")


def build_scalar_optimizer(
    name: str,
    settings: Settings,
    groups: list[dict[str, Any]],
    *,
    plain: bool,
    fused: FusedClasses | None = None,
    **arguments: Any,
) -> torch.optim.Optimizer:
    """Return Adam, SGD or Lion.

    Args:
        name: Its name.
        settings: The configuration.
        groups: Parameter groups.
        plain: Whether to use torch's classes, for tensors that fused kernels do not support.
        fused: Classes to use otherwise; None for torch's.
        **arguments: Constructor arguments that take the place of the configuration's.
    """
    kwargs = scalar_arguments(name, settings)
    decoupled = settings.config.decoupled_weight_decay
    if name == "lion":
        kwargs["weight_decay_method"] = "decoupled" if decoupled else "l2"
        # torch has no Lion; this is also the class that megatron-core builds
        lion: torch.optim.Optimizer = entry_of(name).optimizer_cls(groups, **kwargs | arguments)
        return lion
    if plain:
        fused = None
    # other classes have no such weight decay
    cautious = settings.config.cautious_weight_decay
    is_ours = name == "adam" and (cautious or (settings.config.fused_adam and fused is None))
    if is_ours:
        kwargs |= {"fused": True, CAUTIOUS_DECAY: cautious}
    elif detect_fake_mode() is not None and not (fused or plain):
        # on GPU tensors torch chooses this by itself, but not on fake ones
        kwargs["foreach"] = True
    kwargs |= arguments
    optimizer: torch.optim.Optimizer
    if name == "sgd":
        optimizer = (fused.sgd if fused else torch.optim.SGD)(groups, **kwargs)
    elif is_ours:
        optimizer = (AdamW if decoupled else Adam)(groups, **kwargs)
    elif fused:
        optimizer = fused.adam(groups, **{"adam_w_mode": decoupled, **kwargs})
    else:
        # bit-equal to megatron-core with the same configuration
        optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)(groups, **kwargs)
    return optimizer


def scalar_init_of(optimizer: torch.optim.Optimizer) -> InitState:
    """Return the function that creates the state of Adam, SGD or Lion, unless its rule does."""
    cls = type(optimizer)
    if not _is_fused(cls):
        return None if cls in _ELEMENT_WISE else init_state
    return _init_fused_sgd if cls.__name__ == "FusedSGD" else zeros(FIRST_MOMENT, "exp_avg_sq")


def _init_fused_sgd(opt: Any, config: Any = None) -> None:
    # without momentum there is no buffer
    moving = {id(p) for group in opt.param_groups if group["momentum"] for p in group["params"]}
    for state, param in empty_states(opt):
        if id(param) in moving:
            state[MOMENTUM] = torch.zeros_like(param.data)
