"""Makes the state of emerging-optimizers' classes exist before their first step.

Loading a checkpoint needs it. Some classes have no complete initializer of their own.
"""

from collections.abc import Callable
from typing import Any

import torch

from megatron_eopt.settings.registry import init_state


def _oblique_sgd(opt: Any, config: Any = None) -> None:
    for state, param in empty_states(opt):
        state["momentum_buffer"] = torch.zeros_like(param)


def _oblique_adam(opt: Any, config: Any = None) -> None:
    for state, param in empty_states(opt):
        state["step"] = 0
        state["exp_avg"] = torch.zeros_like(param)
        state["exp_avg_sq"] = torch.zeros_like(param)


def _psgd_pro(opt: Any, config: Any = None) -> None:
    for state, param in empty_states(opt):
        device = param.device
        state["step"] = 0
        state["exp_avg"] = torch.zeros_like(param)
        # one Kronecker factor and one Lipschitz constant for each dimension, in float32
        state["Q"] = [torch.eye(n, device=device) * opt.precond_init_scale for n in param.shape]
        state["L"] = [torch.ones((), device=device) for _ in param.shape]


def _muon_hyperball(opt: Any, config: Any = None) -> None:
    init_state(opt)
    for group in opt.param_groups:
        for param in group["params"]:
            radius = opt.hyperball_radius
            norm = param.norm().item() if radius is None else radius
            opt.state[param].setdefault("hyperball_R", norm)


def empty_states(opt: Any) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """Return the states that are to be made, each with its parameter."""
    params = [param for group in opt.param_groups for param in group["params"]]
    return [(opt.state[param], param) for param in params if not opt.state[param]]


INITIALIZERS: dict[str, Callable[..., None]] = {
    "muon_hyperball": _muon_hyperball,
    "oblique_adam": _oblique_adam,
    "oblique_sgd": _oblique_sgd,
    "psgd_pro": _psgd_pro,
}
"""Functions that make every parameter's state exist, by the name of the optimizer."""
