"""Compare one step of a small GPT with the same step in float64 on the CPU."""

from itertools import pairwise
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_check.context import Context, Outcome
from benchmarks.gpu_check.models import batch_of, build
from tests.harness.models import forward_backward
from tests.reference.muon import muon_step

LR, MOMENTUM, WEIGHT_DECAY, BETAS, EPS = 0.02, 0.95, 0.1, (0.9, 0.95), 1e-8
HEADS, GROUPS, HIDDEN = 8, 4, 64

TOLERANCES = {"fp32": 3e-5, "bf16": 0.25}
"""Largest deviation of a weight, relative to its step. Five iterations amplify rounding errors, by
up to 1e3 at small singular values, which gradients of few tokens have many of. CPUs show 6e-6 and
0.13. A matrix that is split, scaled or transposed wrongly deviates by about 1."""

PRECISION = {"fp32": "highest", "bf16": "medium"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MODEL: dict[str, Any] = {
    "hidden": HIDDEN,
    "heads": HEADS,
    "query_groups": GROUPS,
    "gated": True,
    "bias": True,
}


def run(context: Context) -> Outcome:
    """Compare in float32 and bfloat16."""
    outcome = context.outcome
    worst: dict[str, float] = {}
    for name, tolerance in TOLERANCES.items():
        errors: dict[str, float] = {}
        with outcome.noting(name):
            (errors,) = context.on_ranks(1, deviations, name)
        outcome.figures[name] = {"tolerance": tolerance, "deviations": errors}
        worst[name] = max(errors.values(), default=float("nan"))
        outcome.problems += [
            f"{name}: {weight} deviates by {error:.1e} of its step, {tolerance:.0e} are allowed"
            for weight, error in errors.items()
            # in this form, nan is a problem too
            if not error <= tolerance
        ]
    outcome.headline = "deviation of a step: " + ", ".join(
        f"{name} {error:.1e}" for name, error in worst.items()
    )
    return outcome


def deviations(dtype: str) -> dict[str, float]:
    """Return how far each weight is from the reference after one step, relative to its step."""
    config = {
        "lr": LR,
        "weight_decay": WEIGHT_DECAY,
        "clip_grad": 0.0,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_eps": EPS,
        "muon_momentum": MOMENTUM,
        "muon_fp32_matmul_prec": PRECISION[dtype],
        "use_distributed_optimizer": False,
    }
    chunk, optimizer = build({**MODEL, "dtype": DTYPES[dtype]}, config)
    names = {param: name.replace("module.", "") for name, param in chunk.named_parameters()}
    forward_backward([chunk], [batch_of(seed) for seed in range(2)])
    stored = [item for member in optimizer.chained_optimizers for item in member.shards]
    before = {names[item.param]: _on_host(item.main) for item in stored}
    gradients = {names[item.param]: _on_host(item.param.main_grad) for item in stored}
    optimizer.step()
    found = {}
    for item in stored:
        name = names[item.param]
        weight, gradient = before[name].reshape(item.param.shape), gradients[name]
        expected = expectation(name, weight, gradient)
        after = _on_host(item.main).reshape(weight.shape)
        found[name] = _norm(after - expected) / max(_norm(expected - weight), 1e-30)
        # the model's weight must equal its main weight, rounded once
        if not torch.equal(item.param.detach(), item.main.detach().to(item.param.dtype)):
            found[f"{name}, in the model"] = float("inf")
    return found


def expectation(name: str, weight: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Return a weight after the first step, in float64.

    Args:
        name: Name of the weight in the model, which decides its optimizer.
        weight: The weight before the step.
        gradient: Its gradient, of the same shape.
    """
    if weight.ndim == 2 and "layers." in name:
        new, _ = muon_step(
            weight,
            gradient,
            np.zeros_like(gradient),
            lr=LR,
            momentum=MOMENTUM,
            weight_decay=WEIGHT_DECAY,
            parts=matrices_of(name),
        )
        return new
    # Adam's first step with bias correction; 1-D parameters have no weight decay
    decay = LR * WEIGHT_DECAY if weight.ndim == 2 else 0.0
    direction: np.ndarray = gradient / (np.abs(gradient) + EPS)
    return weight * (1 - decay) - LR * direction


def matrices_of(name: str) -> list[np.ndarray] | None:
    """Return the rows of the logical matrices of a fused weight."""
    if "linear_fc1" in name:
        gate = np.arange(4 * HIDDEN)
        return [gate, gate + 4 * HIDDEN]
    if "linear_qkv" not in name:
        return None
    head, queries = HIDDEN // HEADS, HIDDEN // GROUPS
    group = queries + 2 * head
    starts = np.arange(GROUPS)[:, None] * group
    ends = (0, queries, queries + head, group)
    return [(starts + np.arange(first, last)).ravel() for first, last in pairwise(ends)]


def _on_host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().cpu().numpy().copy()


def _norm(value: Any) -> float:
    return float(np.linalg.norm(value))
