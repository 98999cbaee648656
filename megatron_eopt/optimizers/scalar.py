"""Adam, SGD and Lion: the optimizers for everything that is no matrix.

Transformer Engine's fused ones are used where they are installed, else NVIDIA Apex's, else torch's.
megatron-core makes the same choice, so the classes are taken from it.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from emerging_optimizers.scalar_optimizers import Lion
from megatron.core import optimizer as megatron_optimizer
from megatron.core.utils import log_single_rank

from megatron_eopt.base.names import FIRST_MOMENT, MOMENTUM, STEP
from megatron_eopt.base.versions import megatron_name
from megatron_eopt.settings.arguments import offload_arguments, scalar_arguments
from megatron_eopt.settings.settings import RunSettings

logger = logging.getLogger(__name__)

InitState = Callable[..., None] | None

ELEMENT_WISE_CLASSES = frozenset(
    {
        # fused ones where Transformer Engine or Apex is installed
        megatron_optimizer.Adam,
        megatron_optimizer.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.SGD,
    }
)
"""Classes that update each number by itself."""


def build_scalar_optimizer(
    name: str, groups: list[dict[str, Any]], settings: RunSettings
) -> tuple[torch.optim.Optimizer, InitState]:
    """Return an optimizer and the function that makes its state.

    Args:
        name: "adam", "sgd" or "lion".
        groups: Parameter groups.
        settings: The configuration.
    """
    if settings.offloads:
        return _offloaded(name, groups, settings), None
    kwargs = scalar_arguments(name, settings)
    if name == "lion":
        method = "decoupled" if settings.decoupled_weight_decay else "l2"
        return Lion(groups, weight_decay_method=method, **kwargs), _init_lion
    if name == "sgd":
        sgd = megatron_optimizer.SGD(groups, **kwargs)
        _log_choice(sgd)
        return sgd, _init_sgd
    cls: Any = megatron_optimizer.Adam
    if _is_torch_fallback():
        cls = torch.optim.AdamW if settings.decoupled_weight_decay else torch.optim.Adam
    else:
        kwargs["adam_w_mode"] = settings.decoupled_weight_decay
    adam = cls(groups, **kwargs)
    _log_choice(adam)
    return adam, _init_precision_aware if settings.precision_aware else _init_adam


def plain_scalar_optimizer(
    name: str, groups: list[dict[str, Any]], settings: RunSettings
) -> tuple[torch.optim.Optimizer, InitState]:
    """Return torch's own optimizer in place of a fused one, for tensors that no kernel knows."""
    kwargs = scalar_arguments(name, settings)
    kwargs.pop("capturable", None)
    if name == "adam":
        cls = torch.optim.AdamW if settings.decoupled_weight_decay else torch.optim.Adam
        return cls(groups, **kwargs), None
    if name == "sgd":
        return torch.optim.SGD(groups, **kwargs), None
    return build_scalar_optimizer(name, groups, settings)


def _is_torch_fallback() -> bool:
    return bool(megatron_optimizer.USING_PYTORCH_OPTIMIZER)


def _offloaded(
    name: str, groups: list[dict[str, Any]], settings: RunSettings
) -> torch.optim.Optimizer:
    kwargs = offload_arguments(name, settings)
    gpu_cls, cpu_cls = (
        (megatron_optimizer.Adam, torch.optim.AdamW)
        if name == "adam"
        else (megatron_optimizer.SGD, torch.optim.SGD)
    )
    hybrid: torch.optim.Optimizer = megatron_name("HybridDeviceOptimizer")(
        groups, cpu_optimizer_cls=cpu_cls, gpu_optimizer_cls=gpu_cls, **kwargs
    )
    return hybrid


def _init_precision_aware(opt: Any, config: Any = None) -> None:
    for state, param in _empty_states(opt):
        del state
        opt.initialize_state(param)


def _init_adam(opt: Any, config: Any = None) -> None:
    counts_per_parameter = isinstance(opt, torch.optim.Adam)
    for group in opt.param_groups:
        for param in group["params"]:
            state = opt.state[param]
            if state:
                continue
            if counts_per_parameter:
                on_device = group["capturable"] or group["fused"]
                device = param.device if on_device else torch.device("cpu")
                state[STEP] = torch.zeros((), dtype=torch.float32, device=device)
            state[FIRST_MOMENT] = torch.zeros_like(param.data)
            state["exp_avg_sq"] = torch.zeros_like(param.data)


def _init_lion(opt: Any, config: Any = None) -> None:
    for state, param in _empty_states(opt):
        state[FIRST_MOMENT] = torch.zeros_like(param.data)


def _init_sgd(opt: Any, config: Any = None) -> None:
    # without momentum there is no buffer
    with_momentum = {
        id(p) for group in opt.param_groups if group["momentum"] for p in group["params"]
    }
    for state, param in _empty_states(opt):
        if id(param) in with_momentum:
            state[MOMENTUM] = torch.zeros_like(param.data)


def _empty_states(opt: Any) -> list[tuple[dict[str, Any], torch.Tensor]]:
    params = [param for group in opt.param_groups for param in group["params"]]
    return [(opt.state[param], param) for param in params if not opt.state[param]]


_logged: set[type] = set()


def _log_choice(optimizer: torch.optim.Optimizer) -> None:
    cls = type(optimizer)
    if cls in _logged:
        return
    _logged.add(cls)
    hint = "; no fused one is installed" if _is_torch_fallback() else ""
    log_single_rank(
        logger, logging.INFO, f"scalar parameters use {cls.__module__}.{cls.__qualname__}{hint}"
    )
