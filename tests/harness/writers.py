"""Optimizer classes of other packages, as writers of state.

All steps have the same gradient, so that state tends to a value that shows what it means.
"""

import copy
import importlib
from functools import cache
from typing import Any

import torch
from torch import nn

STEPS = 24
DECAY = 0.8  # of all averages, so that they converge in these steps
LR = 3e-7

_MODULES = {
    "torch.optim": ("torch.optim",),
    "timm.optim": ("timm.optim",),
    "transformers": ("transformers.optimization",),
    "megatron.core": ("megatron.core.optimizer.emerging_optimizers",),
    "emerging_optimizers": (
        "emerging_optimizers.orthogonalized_optimizers",
        "emerging_optimizers.psgd",
        "emerging_optimizers.riemannian_optimizers",
        "emerging_optimizers.scalar_optimizers",
        "emerging_optimizers.soap",
    ),
}

_ARGUMENTS: dict[str, dict[str, Any]] = {
    "emerging_optimizers.AdaptiveMuon": {
        "momentum": DECAY,
        "weight_decay": 0.0,
        "moment2_method": "normuon",
    },
    "megatron.core.TensorParallelMuon": {"tp_mode": "blockwise"},
    "torch.optim.SGD": {"momentum": DECAY},
    "timm.optim.SGDP": {"momentum": DECAY},
    "timm.optim.SGDW": {"momentum": DECAY},
    "timm.optim.Lars": {"momentum": DECAY},
    "timm.optim.Adafactor": {"scale_parameter": False, "betas": (DECAY, DECAY)},
    "transformers.Adafactor": {"relative_step": False, "scale_parameter": False, "beta1": DECAY},
}

_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "torch.optim.SGD, dampening": ("torch.optim.SGD", {"dampening": 0.5}),
    "torch.optim.SGD, maximize": ("torch.optim.SGD", {"maximize": True}),
    "torch.optim.Adam, amsgrad": ("torch.optim.Adam", {"amsgrad": True}),
    "torch.optim.Adam, maximize": ("torch.optim.Adam", {"maximize": True}),
    "torch.optim.RMSprop, momentum": (
        "torch.optim.RMSprop",
        {"momentum": DECAY, "centered": True, "alpha": DECAY},
    ),
    "timm.optim.RMSpropTF, momentum": ("timm.optim.RMSpropTF", {"momentum": DECAY}),
    "timm.optim.SGDW, dampening": ("timm.optim.SGDW", {"dampening": 0.5}),
    "timm.optim.Lion, maximize": ("timm.optim.Lion", {"maximize": True}),
    "timm.optim.Lamb, not averaged": ("timm.optim.Lamb", {"grad_averaging": False}),
    "timm.optim.AdaBelief, amsgrad": ("timm.optim.AdaBelief", {"amsgrad": True}),
    "timm.optim.Muon, adaptive": ("timm.optim.Muon", {"algo": "adamuon"}),
}

_LEFT_OUT = {
    "emerging_optimizers.OrthogonalizedOptimizer",  # abstract
    "transformers.LayerWiseDummyOptimizer",  # without state
    "megatron.core.TensorParallelAdaptiveMuon",  # fails in its first step
}


@cache
def _classes() -> dict[str, type[torch.optim.Optimizer]]:
    found = {}
    for package, modules in _MODULES.items():
        for module in modules:
            try:
                content = vars(importlib.import_module(module))
            except ImportError:
                continue
            for cls in content.values():
                if not isinstance(cls, type) or not cls.__module__.startswith(package):
                    continue
                if issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer:
                    found[f"{package}.{cls.__name__}"] = cls
    return {name: cls for name, cls in sorted(found.items()) if name not in _LEFT_OUT}


def classes() -> list[str]:
    """Return the names of all installed classes."""
    return list(_classes())


def writers() -> list[str]:
    """Return the classes, and those with settings that change what their state means."""
    return [*classes(), *(name for name, (base, _) in _VARIANTS.items() if base in _classes())]


def gradient() -> torch.Tensor:
    """Return the gradient of each step."""
    return 0.01 * torch.randn(6, 6, generator=torch.Generator().manual_seed(1))


def made(name: str, weight: nn.Parameter) -> torch.optim.Optimizer:
    """Return an optimizer over one 6 x 6 weight, with fast averages and without weight decay."""
    base, changes = _VARIANTS.get(name, (name, {}))
    cls: Any = _classes()[base]
    arguments = {**_ARGUMENTS.get(base, {}), **changes}
    if base == "timm.optim.Lookahead":
        return cls(torch.optim.AdamW([weight], lr=LR))  # type: ignore[no-any-return]
    optimizer = cls([weight], lr=LR, **arguments)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
        if "betas" in group:
            group["betas"] = (DECAY,) * len(group["betas"])
        # without momentum, classes have another state
        group |= {key: DECAY for key in ("momentum",) if group.get(key)}
    return optimizer  # type: ignore[no-any-return]


def train(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> None:
    """Take all steps."""
    name = type(optimizer).__name__

    def loss() -> torch.Tensor:
        weight.grad = None
        value = (weight * gradient()).sum() + 1e-9 * (weight**2).sum()
        value.backward(create_graph=name == "Adahessian")
        return value

    for _ in range(STEPS):
        loss()
        if name == "SparseAdam":
            weight.grad = gradient().to_sparse()
        with torch.compiler.set_stance("force_eager"):
            optimizer.step(*([loss] if name == "LBFGS" else []))
    weight.grad = None


@cache
def written(name: str) -> Any:
    """Return the state dict that a class writes after its steps; do not change it."""
    weight = nn.Parameter(torch.full((6, 6), 1 / 6))
    optimizer = made(name, weight)
    train(optimizer, weight)
    return copy.deepcopy(optimizer.state_dict())
