"""Adam, SGD and Lion: the optimizers for everything that is no matrix.

Transformer Engine's fused ones are used where they are installed, else NVIDIA Apex's, else torch's.
megatron-core makes the same choice, so the classes are taken from it.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.utils import is_te_min_version, log_single_rank

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.versions import megatron_name

logger = logging.getLogger(__name__)

InitState = Callable[..., None] | None


def is_torch_fallback() -> bool:
    """Whether torch's own optimizers are in use because no fused ones are installed."""
    return bool(megatron_optimizer.USING_PYTORCH_OPTIMIZER)


def build_scalar_optimizer(
    name: str, groups: list[dict[str, Any]], config: Any
) -> tuple[torch.optim.Optimizer, InitState]:
    """Return an optimizer and the function that makes its state.

    Args:
        name: "adam", "sgd" or "lion".
        groups: Parameter groups.
        config: An ``OptimizerConfig``.
    """
    if config.optimizer_cpu_offload:
        return _offloaded(name, groups, config), None
    if name == "adam":
        return _adam(groups, config), _init_adam_state
    if name == "lion":
        from emerging_optimizers.scalar_optimizers import Lion

        lion = Lion(
            groups,
            lr=config.lr,
            betas=(config.lion_beta1, config.lion_beta2),
            weight_decay=config.weight_decay,
            weight_decay_method="decoupled" if config.decoupled_weight_decay else "l2",
        )
        return lion, _init_lion_state
    sgd = megatron_optimizer.SGD(
        groups, lr=config.lr, weight_decay=config.weight_decay, momentum=config.sgd_momentum
    )
    _log_choice(sgd)
    return sgd, _init_sgd_state


def _adam(groups: list[dict[str, Any]], config: Any) -> torch.optim.Optimizer:
    kwargs: dict[str, Any] = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        **adam_numbers(config),
        "capturable": config.optimizer_cuda_graph,
    }
    if is_torch_fallback():
        cls = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
    else:
        cls = megatron_optimizer.Adam
        kwargs["adam_w_mode"] = config.decoupled_weight_decay
    if config.use_precision_aware_optimizer:
        kwargs |= _precision_aware_kwargs(config)
    adam = cls(groups, **kwargs)
    _log_choice(adam)
    return adam


def adam_numbers(config: Any) -> dict[str, Any]:
    """Return Adam's ``betas`` and ``eps`` as floats; torch takes no integers among them."""
    betas = (float(config.adam_beta1), float(config.adam_beta2))
    return {"betas": betas, "eps": float(config.adam_eps)}


def _precision_aware_kwargs(config: Any) -> dict[str, Any]:
    kwargs = {"exp_avg_dtype": config.exp_avg_dtype, "exp_avg_sq_dtype": config.exp_avg_sq_dtype}
    if config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        # Otherwise megatron-core keeps the main parameters itself, which fp8 weights need.
        kwargs |= {
            "master_weights": True,
            "use_decoupled_grad": True,
            "master_weight_dtype": config.main_params_dtype,
        }
    if is_te_min_version("2.1.0.dev0"):
        kwargs["store_param_remainders"] = config.store_param_remainders
    return kwargs


def _offloaded(name: str, groups: list[dict[str, Any]], config: Any) -> torch.optim.Optimizer:
    if name not in ("adam", "sgd"):
        raise ConfigurationError(
            "optimizer_cpu_offload", True, f"does not work with {name}", "Use adam or sgd"
        )
    if not config.decoupled_weight_decay:
        raise ConfigurationError(
            "optimizer_cpu_offload",
            True,
            "needs decoupled weight decay",
            "Set decoupled_weight_decay=True",
        )
    gpu_cls, cpu_cls = (
        (megatron_optimizer.Adam, torch.optim.AdamW)
        if name == "adam"
        else (megatron_optimizer.SGD, torch.optim.SGD)
    )
    kwargs: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if name == "adam":
        kwargs |= {**adam_numbers(config), "bias_correction": True, "fused": True}
    else:
        kwargs["momentum"] = config.sgd_momentum
    hybrid: torch.optim.Optimizer = megatron_name("HybridDeviceOptimizer")(
        groups,
        offload_fraction=config.optimizer_offload_fraction,
        cpu_optimizer_cls=cpu_cls,
        gpu_optimizer_cls=gpu_cls,
        overlap_cpu_optimizer_d2h_h2d=config.overlap_cpu_optimizer_d2h_h2d,
        pin_cpu_grads=config.pin_cpu_grads,
        pin_cpu_params=config.pin_cpu_params,
        param_update_in_fp32=True,
        **kwargs,
    )
    return hybrid


def _init_adam_state(opt: Any, config: Any = None) -> None:
    counts_per_parameter = isinstance(opt, torch.optim.Adam)
    for group in opt.param_groups:
        for param in group["params"]:
            state = opt.state[param]
            if state:
                continue
            if config is not None and config.use_precision_aware_optimizer:
                opt.initialize_state(param)
                continue
            if counts_per_parameter:
                on_device = group["capturable"] or group["fused"]
                device = param.device if on_device else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(param.data)
            state["exp_avg_sq"] = torch.zeros_like(param.data)


def _init_lion_state(opt: Any, config: Any = None) -> None:
    _init_buffer(opt, "exp_avg", [group["params"] for group in opt.param_groups])


def _init_sgd_state(opt: Any, config: Any = None) -> None:
    # without momentum there is no buffer
    params = [group["params"] for group in opt.param_groups if group["momentum"]]
    _init_buffer(opt, "momentum_buffer", params)


def _init_buffer(opt: Any, name: str, groups: Iterable[Iterable[torch.Tensor]]) -> None:
    for params in groups:
        for param in params:
            if not opt.state[param]:
                opt.state[param][name] = torch.zeros_like(param.data)


_logged: set[type] = set()


def _log_choice(optimizer: torch.optim.Optimizer) -> None:
    cls = type(optimizer)
    if cls in _logged:
        return
    _logged.add(cls)
    hint = "; no fused one is installed" if is_torch_fallback() else ""
    log_single_rank(
        logger, logging.INFO, f"scalar parameters use {cls.__module__}.{cls.__qualname__}{hint}"
    )
