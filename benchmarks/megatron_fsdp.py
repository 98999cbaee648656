"""Muon on Megatron-FSDP's shards: our step against gathering every matrix on every rank.

``python -m benchmarks.megatron_fsdp``: both in turn, in the same processes, on the same gradients.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.fsdp.src.megatron_fsdp import fully_shard_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.about import about, publish
from benchmarks.fsdp2.arms import DECAY, EVEN, LR, MOMENTUM, STEPS, Matrices, gradients
from benchmarks.page.sections import megatron_fsdp
from benchmarks.rounds import measured, milliseconds, slowest
from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.math import orthogonalize
from tests.harness import run_ranks

ARMS = OURS, EVERYWHERE = "ours", "gathered everywhere"
WARM_UP = 2


class GatheredEverywhere:
    """Muon that brings each matrix to all ranks, in one collective a matrix; all compute on it."""

    def __init__(self, model: Any) -> None:
        self._params = [
            param for _, param in model.param_and_grad_buffer.optimizer_named_parameters
        ]
        self._momenta = [torch.zeros_like(param.to_local()) for param in self._params]
        sizes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sizes, [param.to_local().shape[0] for param in self._params])
        self._rows = list(zip(*sizes, strict=True))

    @torch.no_grad()
    def step(self) -> None:
        """Update all weights."""
        for param, momentum, rows in zip(self._params, self._momenta, self._rows, strict=True):
            local = param.to_local()
            grad = torch.zeros_like(local) if param.grad is None else param.grad.to_local()
            momentum.lerp_(grad, 1 - MOMENTUM)
            update = _own_rows(_orthogonal(_gathered(grad.lerp(momentum, MOMENTUM), rows)), rows)
            local.mul_(1 - LR * DECAY).sub_(LR * 0.2 * max(param.shape) ** 0.5 * update)


def _gathered(mine: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
    """Return the whole matrix; rows are padded to the most that a rank has."""
    most = max(rows)
    padded = mine.new_zeros(most, mine.shape[1])
    padded[: mine.shape[0]] = mine
    every = padded.new_empty(len(rows), most, mine.shape[1])
    dist.all_gather_into_tensor(every.view(-1), padded.view(-1))
    return torch.cat([part[:count] for part, count in zip(every, rows, strict=True)])


def _own_rows(whole: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
    return torch.split(whole, rows)[dist.get_rank()]


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    return orthogonalize(matrix, coefficients="simple", steps=STEPS)


def _model() -> Any:
    names = ("fsdp", "tp")
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=names)
    return fully_shard_model(
        Matrices(EVEN),
        device_mesh=mesh,
        dp_shard_dim="fsdp",
        tp_dim="tp",
        fsdp_unit_modules=[Matrices],
    )


def _set_gradients(model: Any, step: int) -> None:
    params = list(model.module.parameters())
    for param, grad in zip(params, gradients([p.shape for p in params], step), strict=True):
        local = param.to_local()
        part = grad.view(-1)[param.megatron_fsdp_slice].view(local.shape).clone()
        layout = {"shape": param.shape, "stride": param.stride(), "run_check": False}
        param.grad = None
        if local.numel():
            param.grad = DTensor.from_local(part, param.device_mesh, param.placements, **layout)


def _on_rank(rounds: int) -> dict[str, Any]:
    config = EmergingOptimizerConfig(
        optimizer="muon",
        lr=LR,
        weight_decay=DECAY,
        clip_grad=0.0,
        muon_momentum=MOMENTUM,
        muon_nesterov=True,
        muon_coefficient_type="simple",
        muon_num_ns_steps=STEPS,
        muon_fp32_matmul_prec="highest",
        muon_scale_mode="spectral",
        muon_extra_scale_factor=0.2,
    )
    models = {OURS: _model(), EVERYWHERE: _model()}
    ours = build_optimizer(models[OURS], config)
    steppers: dict[str, Any] = {OURS: ours, EVERYWHERE: GatheredEverywhere(models[EVERYWHERE])}
    steps = {arm: partial(_step, models[arm], stepper) for arm, stepper in steppers.items()}
    times = measured(steps, rounds, WARM_UP)
    pairs = zip(
        models[OURS].module.parameters(), models[EVERYWHERE].module.parameters(), strict=True
    )
    squares = torch.zeros(2)
    for mine, its in pairs:
        squares[0] += (mine.to_local() - its.to_local()).square().sum()
        squares[1] += its.to_local().square().sum()
    dist.all_reduce(squares)
    calls = sum(plan.calls for plan in ours.plans)
    sent = sum(plan.bytes_sent for plan in ours.plans)
    return {
        "times": times,
        "calls": calls,
        "bytes": sent,
        "far": float(squares[0] / squares[1]) ** 0.5,
    }


def _step(model: Any, stepper: Any, round_: int) -> float:
    _set_gradients(model, round_)
    return milliseconds(stepper.step)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.megatron_fsdp", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="steps of each, 4 or more")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    before = about()
    figures = {}
    for ranks in args.ranks:
        found = run_ranks(ranks, _on_rank, args.rounds, timeout=280)
        times = {arm: slowest([rank["times"][arm] for rank in found]) for arm in ARMS}
        sent = sum(rank["bytes"] for rank in found)
        counts = {"calls": found[0]["calls"], "bytes": sent, "far": found[0]["far"]}
        figures[ranks] = {"times": times, **counts}
    publish({"ranks": figures}, before, args.json, megatron_fsdp)


if __name__ == "__main__":
    main()
