"""Registers the optimizers of this package and of emerging-optimizers under their names."""

import functools
from collections.abc import Callable
from typing import Any, get_args

import torch
from emerging_optimizers import (
    psgd,  # noqa: F401  importing a package registers its optimizers
    riemannian_optimizers,  # noqa: F401
    scalar_optimizers,  # noqa: F401
    soap,  # noqa: F401
)
from emerging_optimizers import registry as emerging_registry
from emerging_optimizers.orthogonalized_optimizers import Muon

from megatron_eopt.config.arguments import muon_family_kwargs
from megatron_eopt.config.config_file import (
    load_optimizer_config,  # noqa: F401  re-exported here, since it needs all optimizers
)
from megatron_eopt.config.registry import init_state, is_registered, register_optimizer
from megatron_eopt.matrices import SplitT
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.optimizers.update_rule import empty_states, zeros

_ELEMENT_WISE = frozenset({"lion", "laprop"})

# optimizers that draw random numbers in a step
_DRAWS = frozenset({"psgd_pro"})

_FACTORY_FIELDS = frozenset(
    {"muon_scalar_optimizer", "muon_skip_grad_clip"}
    | {"muon_lr", "muon_min_lr", "muon_weight_decay"}
    | {"muon_orthogonalize_router", "muon_ignore_use_muon", "muon_convolutions"}
    | {f"muon_split_{kind}" for kind in get_args(SplitT.__value__)}
)
"""Fields of Muon that are not arguments of its constructor."""


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
    # from emerging-optimizers 0.4 on, the radius is an argument, not a state
    for group in opt.param_groups if hasattr(opt, "hyperball_radius") else ():
        for param in group["params"]:
            radius = opt.hyperball_radius
            norm = param.norm().item() if radius is None else radius
            opt.state[param].setdefault("hyperball_R", norm)


_INITIALIZERS: dict[str, Callable[..., None]] = {
    "muon_hyperball": _muon_hyperball,
    "oblique_adam": zeros("exp_avg", "exp_avg_sq", step=0),
    "oblique_sgd": zeros("momentum_buffer"),
    "psgd_pro": _psgd_pro,
}
"""Functions that create every parameter's state before the first step, which loading needs, for
classes whose own initializer is missing or incomplete."""

# adaptive Muon supports neither: its statistics need whole matrices and change while it computes
_OF_MUON = {
    "muon": {"muon_max_ranks_per_matrix", "muon_overlap_dp_comm"},
    "adaptive_muon": set[str](),
}
for _name, _cls in (("muon", TensorParallelMuon), ("adaptive_muon", TensorParallelAdaptiveMuon)):
    _prefixes = tuple(dict.fromkeys((_name, "muon")))
    register_optimizer(
        _name,
        _cls,
        config_to_kwargs=functools.partial(muon_family_kwargs, _cls, _prefixes),
        state_layout="matrix_update",
        prefixes=_prefixes,
        consumes=_FACTORY_FIELDS | _OF_MUON[_name],
    )
# emerging-optimizers has `muon` and `adaptive_muon`, too; those above take precedence
for _name in emerging_registry.get_optimizer_name_list():
    if not is_registered(_name):
        _cls = emerging_registry.get_optimizer_cls(_name)
        _is_muon = issubclass(_cls, Muon)
        register_optimizer(
            _name,
            _cls,
            init_state_fn=_INITIALIZERS.get(_name, init_state),
            # matrix_state also fits optimizers of which only the update needs a whole matrix
            state_layout="element_wise" if _name in _ELEMENT_WISE else "matrix_state",
            prefixes=(_name, "muon") if _is_muon else (_name,),
            consumes=_FACTORY_FIELDS if _is_muon else frozenset(),
            draws=_name in _DRAWS,
        )
