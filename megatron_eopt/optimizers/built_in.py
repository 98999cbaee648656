"""Registers the optimizers of this package and of emerging-optimizers under their names."""

import functools
from collections.abc import Callable
from typing import Any, get_args

import torch

from megatron_eopt.config.arguments import muon_family_kwargs
from megatron_eopt.config.registry import LateEntry, init_state, register_optimizer
from megatron_eopt.matrices import SplitT
from megatron_eopt.optimizers.adaptive_settings import AdaptiveMuonSettings
from megatron_eopt.optimizers.muon_settings import MuonSettings
from megatron_eopt.optimizers.update_rule import empty_states, zeros

_ELEMENT_WISE = frozenset({"lion", "laprop"})

_VARIANTS_OF_MUON = frozenset({"muon_hyperball", "sinkhorn_muon"})
"""Those of emerging-optimizers that read Muon's settings."""

_DRAWS = frozenset({"psgd_pro"})
"""Optimizers that draw random numbers in a step."""

_CLASSES = {
    "laprop": "scalar_optimizers.laprop.LaProp",
    "lion": "scalar_optimizers.lion.Lion",
    "mop": "orthogonalized_optimizers.mop.MOP",
    "muon_hyperball": "orthogonalized_optimizers.muon_hyperball.MuonHyperball",
    "polargrad": "orthogonalized_optimizers.polargrad.PolarGrad",
    "scion": "orthogonalized_optimizers.scion.Scion",
    "sinkhorn_muon": "orthogonalized_optimizers.sinkhorn_muon.SinkhornMuon",
    "spel": "orthogonalized_optimizers.spel.Spel",
    "soap": "soap.soap.SOAP",
    "rekls": "soap.rekls.REKLS",
    "psgd_pro": "psgd.psgd.PSGDPro",
    "oblique_sgd": "riemannian_optimizers.normalized_optimizer.ObliqueSGD",
    "oblique_adam": "riemannian_optimizers.normalized_optimizer.ObliqueAdam",
}
"""The other classes of emerging-optimizers, which are imported when they are chosen."""

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
for _name, _settings_cls, _class in (
    ("muon", MuonSettings, "muon.TensorParallelMuon"),
    ("adaptive_muon", AdaptiveMuonSettings, "adaptive_muon.TensorParallelAdaptiveMuon"),
):
    _prefixes = tuple(dict.fromkeys((_name, "muon")))
    register_optimizer(
        _name,
        LateEntry(
            f"{__package__}.{_class}",
            settings_cls=_settings_cls,
            config_to_kwargs=functools.partial(muon_family_kwargs, _settings_cls, _prefixes),
            state_layout="matrix_update",
            prefixes=_prefixes,
            consumes=_FACTORY_FIELDS | _OF_MUON[_name],
        ),
    )
for _name, _class in _CLASSES.items():
    _is_muon = _name in _VARIANTS_OF_MUON
    register_optimizer(
        _name,
        LateEntry(
            f"emerging_optimizers.{_class}",
            init_state_fn=_INITIALIZERS.get(_name, init_state),
            # matrix_state also fits optimizers of which only the update needs a whole matrix
            state_layout="element_wise" if _name in _ELEMENT_WISE else "matrix_state",
            prefixes=(_name, "muon") if _is_muon else (_name,),
            consumes=_FACTORY_FIELDS if _is_muon else frozenset(),
            draws=_name in _DRAWS,
        ),
    )
