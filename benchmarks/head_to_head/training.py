"""Train a model with one of the three optimizers, and time its steps."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Generator, nn
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.head_to_head.models import Task, loss_of, made
from benchmarks.rounds import measured
from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.fsdp2 import build_optimizer

WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
"""Adam's. Its usual 0.999 averages over more steps than these runs have."""

EVALUATIONS = 20
"""Evaluations of a run."""

WARM_UP = 5
"""Untimed rounds."""

HELD_OUT_SEED = 1_000_003

type Optimizers = list[torch.optim.Optimizer]
type Curve = list[tuple[int, float]]
"""Steps and held-out losses; a loss that is not finite counts as DIVERGED."""

DIVERGED = 1e9


def ours(model: nn.Module, rate: float) -> Optimizers:
    """Return Muon for matrices and convolutions with AdamW for the rest, in one optimizer."""
    config = EmergingOptimizerConfig(
        optimizer="muon",
        muon_scale_mode="adamw_rms",
        muon_nesterov=True,
        muon_convolutions=True,
        lr=rate,
        weight_decay=WEIGHT_DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
    )
    return [build_optimizer(model, config, output_layers=["head"])]


def torchs(model: nn.Module, rate: float) -> Optimizers:
    """Return torch.optim.Muon for weights of hidden linear layers, and AdamW for the rest."""
    muon = torch.optim.Muon(
        hidden(model), lr=rate, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, *adamw(model, rate, but=hidden(model))]


def adamw(model: nn.Module, rate: float, but: list[nn.Parameter] | None = None) -> Optimizers:
    """Return AdamW for all parameters ``but`` some; norms and biases do not decay."""
    left = {id(param) for param in but or []}
    params = [param for param in model.parameters() if id(param) not in left]
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]
    return [torch.optim.AdamW(groups, lr=rate, betas=BETAS)]


def hidden(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights of all linear layers but the head."""
    layers = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    return [layer.weight for name, layer in layers if name != "head"]


ARMS: dict[str, Callable[[nn.Module, float], Optimizers]] = {
    "ours": ours,
    "torch": torchs,
    "adamw": adamw,
}


class Training:
    """A run: warm-up over a twentieth of the steps, then a linear decay to zero."""

    def __init__(self, task: Task, arm: str, rate: float, seed: int, steps: int, width: int):
        self.task, self.model = task, made(task, width, seed)
        self.generator = Generator().manual_seed(seed)
        self.optimizers = ARMS[arm](self.model, rate)

        def share(step: int) -> float:
            return min((step + 1) / max(1, steps // 20), 1 - step / steps)

        self.schedulers = [LambdaLR(optimizer, share) for optimizer in self.optimizers]

    def step(self) -> float:
        """Train on one batch; return the seconds of the optimizers' step."""
        batch = self.task.batch("train", self.task.batch_size, self.generator)
        loss_of(self.model, batch).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        began = time.perf_counter()
        for optimizer in self.optimizers:
            optimizer.step()
        seconds = time.perf_counter() - began
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            scheduler.step()
            optimizer.zero_grad()
        return seconds

    def held_out(self) -> float:
        """Return the loss on held-out data, the same for all runs."""
        generator = Generator().manual_seed(HELD_OUT_SEED)
        with torch.no_grad():
            loss = loss_of(self.model, self.task.batch("test", self.task.held_out, generator))
        return float(loss) if loss.isfinite() else DIVERGED


def trained(task: Task, arm: str, rate: float, seed: int, steps: int, width: int) -> Curve:
    """Train from the first step to the last; return the held-out losses."""
    run, curve = Training(task, arm, rate, seed, steps, width), []
    for step in range(1, steps + 1):
        run.step()
        if step % max(1, steps // EVALUATIONS) == 0 or step == steps:
            curve.append((step, run.held_out()))
    return curve


def step_times(task: Task, rounds: int, width: int) -> dict[str, dict[str, float]]:
    """Return by arm the median seconds of a whole step, and of the optimizers' part of it."""
    runs = {arm: Training(task, arm, 1e-3, 0, rounds + WARM_UP, width) for arm in ARMS}

    def timed(arm: str, _: int) -> tuple[float, float]:
        began = time.perf_counter()
        part = runs[arm].step()
        return time.perf_counter() - began, part

    found = measured({arm: partial(timed, arm) for arm in ARMS}, rounds, WARM_UP)
    return {
        arm: {
            kind: statistics.median(column)
            for kind, column in zip(("step", "optimizer"), zip(*times, strict=True), strict=True)
        }
        for arm, times in found.items()
    }
