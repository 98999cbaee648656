"""How far this package's Muon and torch.optim.Muon are apart at equal settings and gradients."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
from torch import Generator, Tensor, nn

from benchmarks.head_to_head.models import TASKS, loss_of, made
from benchmarks.head_to_head.training import WEIGHT_DECAY, hidden
from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.fsdp2 import build_optimizer

SCALES = {"original": "shape_scaling", "match_rms_adamw": "adamw_rms"}
"""torch's ``adjust_lr_fn``, and the ``muon_scale_mode`` that does the same."""

STEPS, RATE = 10, 0.01


@contextmanager
def torch_multiplies_in(dtype: torch.dtype) -> Iterator[None]:
    """Let torch.optim.Muon, which has no such setting, multiply in another type in a block."""
    with mock.patch.object(torch, "bfloat16", dtype):
        yield


def of_torch(model: nn.Module, scale: str) -> torch.optim.Optimizer:
    """Return torch.optim.Muon for the hidden weights."""
    return torch.optim.Muon(hidden(model), lr=RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn=scale)


def of_ours(model: nn.Module, scale: str, precision: str) -> torch.optim.Optimizer:
    """Return this package's Muon for the hidden weights, with torch's settings."""
    for param in model.parameters():
        param.requires_grad = any(param is weight for weight in hidden(model))
    config = EmergingOptimizerConfig(
        optimizer="muon",
        lr=RATE,
        weight_decay=WEIGHT_DECAY,
        muon_nesterov=True,
        muon_coefficient_type="simple",
        muon_scale_mode=SCALES[scale],
        muon_fp32_matmul_prec=precision,
    )
    return build_optimizer(model, config)


RUNS = {
    "ours, float32": (partial(of_ours, precision="highest"), torch.bfloat16),
    "torch, float32": (of_torch, torch.float32),
    "ours, 16 bits": (partial(of_ours, precision="medium"), torch.bfloat16),
    "torch, 16 bits": (of_torch, torch.bfloat16),
}
"""Makers of optimizers, and the type in which torch.optim.Muon multiplies."""


def deviations(scale: str, width: int) -> dict[str, float]:
    """Step the GPT's hidden weights with gradients that a float64 run of torch.optim.Muon has.

    Args:
        scale: torch's ``adjust_lr_fn``.
        width: Width of the GPT.

    Returns:
        By name of a run in float32, the distance of its weights from those of the float64 run after
        ten steps, relative to how far that run has moved them.
    """
    task, generator = TASKS["gpt"], Generator().manual_seed(0)
    exact = made(task, width, seed=0).double()
    start = _flat(exact)
    leader = of_torch(exact, scale)
    models = {name: copy.deepcopy(exact).float() for name in RUNS}
    optimizers = {name: make(models[name], scale) for name, (make, _) in RUNS.items()}
    for _ in range(STEPS):
        exact.zero_grad()
        loss_of(exact, task.batch("train", task.batch_size, generator)).backward()
        for name, (_, dtype) in RUNS.items():
            for weight, source in zip(hidden(models[name]), hidden(exact), strict=True):
                weight.grad = source.grad.float()
            with torch_multiplies_in(dtype):
                optimizers[name].step()
        with torch_multiplies_in(torch.float64):
            leader.step()
    moved = (_flat(exact) - start).norm()
    return {
        name: float((_flat(model) - _flat(exact)).norm() / moved) for name, model in models.items()
    }


def _flat(model: nn.Module) -> Tensor:
    """Return a copy of all hidden weights in float64, one after another."""
    return torch.cat([weight.detach().double().flatten() for weight in hidden(model)])
