"""Run the step of one rank of a large job, as it is, beside its plan and other optimizers.

The same rank steps with ours, with Adam, and with megatron-core's Muon.
"""

from dataclasses import asdict
from fractions import Fraction
from typing import Any, NamedTuple

from benchmarks.gpu_check.context import Context, Outcome
from benchmarks.gpu_check.replay import Run, replay, replay_others, scaled
from megatron_eopt.tools.plan.machine import MACHINES
from megatron_eopt.tools.plan.model import ParallelLayout
from megatron_eopt.tools.plan.planning import Plan, plan
from megatron_eopt.tools.recipe import recipe
from megatron_eopt.wrappers.config import EmergingOptimizerConfig


class Job(NamedTuple):
    """A job of Llama-3-8B of which one rank is run."""

    layout: ParallelLayout
    scale: Fraction = Fraction(1)  # elements of each weight, as a part of the model's
    layers: int = 32


JOBS = {"Llama-3-8B, TP 8 x DP 64": Job(ParallelLayout(tensor=8, data=64))}
SMALL_JOBS = {
    "Llama-3-8B, TP 2 x DP 4, 1/64": Job(
        ParallelLayout(tensor=2, data=4), Fraction(1, 64), layers=2
    )
}
OTHERS = ("adam", "stock")
"""Keys of other optimizers' runs."""


def run(context: Context) -> Outcome:
    """Replay the busiest rank of every job; its counts must be those of the plan."""
    outcome, told = context.outcome, []
    for name, job in (SMALL_JOBS if context.small else JOBS).items():
        with outcome.noting(name):
            outcome.figures[name] = found = replayed(job)
            if not found["counts_agree"]:
                outcome.problems.append(f"{name}: kernels, bytes or calls are not the plan's")
            outcome.problems += [
                f"{name}, {other}: {found[other]['left_out']}"
                for other in OTHERS
                if "left_out" in found[other]
            ]
            told.append(f"{name}: {_headline(found)}")
    outcome.headline = "; ".join(told)
    return outcome


def replayed(job: Job) -> dict[str, Any]:
    """Return the step of a job's busiest rank beside the plan's and others', as plain values."""
    one = recipe("llama-3-8b")
    how: dict[str, Any] = {"lr": 1e-3, "bf16": True, "use_distributed_optimizer": True}
    config = EmergingOptimizerConfig(**how, **one.optimizer_settings)
    model = one.architecture(num_layers=job.layers)
    model = model if job.scale == 1 else scaled(model, job.scale)
    planned = plan(model, job.layout, MACHINES["H100"], config, tokens=2**22)
    what = model, job.layout, config, planned.rank
    done, others = replay(*what), replay_others(*what)
    found = {
        "rank": done.rank,
        "device": done.device,
        "counts_agree": done.agrees,
        "counted": asdict(done.report.total),
        "expected": asdict(done.expected.total),
        "memory": asdict(done.report.memory),
        "expected_memory": asdict(done.expected.memory),
        "planned": {**asdict(planned.times), "step": planned.times.step},
        "planned_share": planned.share,
        **_as_dict(done, planned),
    }
    for name, other in others.items():
        if isinstance(other, str):
            found[name] = {"left_out": other}
        else:
            share = None if other.share is None else asdict(other.share)
            found[name] = _as_dict(other, planned) | {"share": share, "notes": other.notes}
    return found


def _as_dict(run: Run, planned: Plan) -> dict[str, Any]:
    return {
        "seconds": {"step": run.step, **run.parts},
        "share_of_iteration": run.step / (run.step + planned.passes.seconds),
        "peak": run.peak,
        "elements": run.elements,
    }


def _headline(found: dict[str, Any]) -> str:
    runs = {"ours": found, **{other: found[other] for other in OTHERS}}
    steps = (
        f"{name} {1e3 * one['seconds']['step']:.3g}"
        for name, one in runs.items()
        if "seconds" in one
    )
    return f"ms of a step: {', '.join(steps)}, ours planned {1e3 * found['planned']['step']:.3g}"
