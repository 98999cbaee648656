"""Time a step against megatron-core's optimizers, on the same model and gradients."""

import contextlib
import gc
import os
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from benchmarks.gpu_check.context import Context, Outcome
from benchmarks.gpu_check.models import LARGE, give_gradients, gpt, settings, with_rates
from benchmarks.gpu_check.profile import split_of_step
from benchmarks.gpu_check.ranks import CONNECTIONS, COUNTS
from benchmarks.optimizer_step.arms import OURS, STOCK, Arm, wrapped_for
from benchmarks.rounds import measured, milliseconds, ratios, slowest
from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.math.backends import automatic, get_backend
from tests.harness.megatron import initialize_megatron

SMALL = LARGE | {"layers": 1, "hidden": 32, "heads": 4, "query_groups": 2, "vocabulary": 32}
ROUNDS, SMALL_ROUNDS, WARM_UP = 20, 2, 3

BYTES_OF_A_WEIGHT = 2 + 4 + 4
"""Weight in 16 bits; gradient and main weight in 32 bits."""

BYTES_OF_A_MOMENT = 4
_SPARE = 6 * 2**30  # for stacks of matrices, temporary lists and libraries

TOLERANCE = 0.05
"""Largest difference of a weight from megatron-core's, relative to the change by the steps, for
the same iteration. It comes from bfloat16 rounding in another order of summation."""


MUON, SAME, PLAIN, ADAM = "muon", "muon, stock's iteration", "stock muon, plain", "adam"
ARMS = (
    Arm(MUON, OURS, EmergingOptimizerConfig, "auto", "fragments"),
    Arm(SAME, OURS, OptimizerConfig, "auto", "fragments"),
    Arm(PLAIN, STOCK, OptimizerConfig, "duplicated"),
    Arm("stock muon, layer-wise", STOCK, OptimizerConfig, "duplicated", "padded"),
    Arm(ADAM, OURS, EmergingOptimizerConfig, "auto", "fragments", "adam"),
    Arm("stock adam", STOCK, OptimizerConfig, "duplicated", "fragments", "adam"),
)


def arms() -> list[Arm]:
    """Return all contestants, with Muon on every installed back end that supports this GPU."""
    found = list(ARMS)
    # without what ``auto`` means here
    others = ("torch", "gram_newton_schulz", "transformer_engine")
    for name in (other for other in others if other != automatic()):
        with contextlib.suppress(ConfigurationError, ImportError):
            get_backend(name)
            own = (OURS, EmergingOptimizerConfig, "auto", "fragments")
            found.append(Arm(f"muon, {name}", *own, backend=name))
    return found


def run(context: Context) -> Outcome:
    """Time all contestants in turn; compare the weights of those with the same iteration."""
    outcome = context.outcome
    large = SMALL if context.small else LARGE
    for groups in (large["query_groups"], large["heads"]):
        with outcome.noting(f"{groups} query groups"):
            _time(large | {"query_groups": groups}, context, outcome)
    if outcome.skipped is None:
        with outcome.noting("connections"):
            _with_connections(large, context, outcome)
    return outcome


def _time(model: dict[str, Any], context: Context, outcome: Outcome) -> None:
    if context.device == "cuda" and (why := _no_room(model)):
        outcome.skipped = why
        return
    rounds = SMALL_ROUNDS if context.small else ROUNDS
    ranks = context.on_ranks(context.ranks, times_and_weights, model, rounds)
    names = list(ranks[0]["times"])
    times = {name: slowest([rank["times"][name] for rank in ranks]) for name in names}
    difference = _largest([rank["difference"] for rank in ranks])
    figures = {
        "milliseconds": {name: statistics.median(times[name]) for name in names},
        "of ours": {name: ratios(times[name], times[MUON]) for name in names[1:]},
        "all": times,
        "difference": difference,
        "split": ranks[0]["split"],
    }
    # the first model's figures are those of the page
    if outcome.figures:
        outcome.figures[f"{model['query_groups']} query groups"] = figures
    else:
        outcome.figures = figures
    # in this form, nan is a problem too
    if not difference <= TOLERANCE:
        outcome.problems.append(
            f"{SAME}: weights differ from megatron-core's by {difference:.1e} of their way"
        )
    told = (f"{name} {statistics.median(times[name]):.3g}" for name in names)
    headline = f"{model['query_groups']} query groups, ms of a step: {', '.join(told)}"
    outcome.headline = "; ".join(filter(None, (outcome.headline, headline)))


def _with_connections(model: dict[str, Any], context: Context, outcome: Outcome) -> None:
    """Time ours and Adam with the connections that the other arms have not run with."""
    others = [count for count in COUNTS if count != os.environ.get(CONNECTIONS)]
    is_on_gpu = context.device == "cuda"
    for count in others if is_on_gpu else others[:1]:
        # on a CPU it has no effect, and another value would cost a new process
        with patch.dict(os.environ, {CONNECTIONS: count} if is_on_gpu else {}):
            job = (model, ROUNDS if is_on_gpu else SMALL_ROUNDS, (MUON, ADAM))
            ranks = context.on_ranks(context.ranks, times_of, *job)
        found = {name: statistics.median(slowest([r[name] for r in ranks])) for name in ranks[0]}
        outcome.figures.setdefault("connections", {})[count] = found
        told = ", ".join(f"{name} {value:.3g}" for name, value in found.items())
        outcome.headline += f"; with {count} connections: {told}"


def times_of(model: dict[str, Any], rounds: int, names: Sequence[str]) -> dict[str, list[float]]:
    """Return this rank's milliseconds of the arms of these names."""
    initialize_megatron()
    steps = {arm.name: partial(_step, *_made(arm, model)) for arm in ARMS if arm.name in names}
    return measured(steps, rounds, WARM_UP)


def times_and_weights(model: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Return this rank's milliseconds by arm, and the largest difference of weights."""
    initialize_megatron()
    made = {arm.name: _made(arm, model) for arm in arms()}
    before = _weights(made[PLAIN])
    steps = {name: partial(_step, *one) for name, one in made.items()}
    times = measured(steps, rounds, WARM_UP)
    way = [stock - start for stock, start in zip(_weights(made[PLAIN]), before, strict=True)]
    gaps = (a - b for a, b in zip(_weights(made[SAME]), _weights(made[PLAIN]), strict=True))
    difference = _largest(
        [
            float(gap.norm() / moved.norm().clamp(min=1e-30))
            for gap, moved in zip(gaps, way, strict=True)
        ]
    )
    split = split_of_step(partial(steps[MUON], rounds))
    del made, steps
    gc.collect()
    return {"times": times, "difference": difference, "split": split}


def _made(arm: Arm, model: dict[str, Any]) -> tuple[Any, Any]:
    """Build a contestant's model and optimizer; all start from the same weights."""
    model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234)
    chunk = wrapped_for(arm.storage, gpt(model))
    return chunk, with_rates(arm.optimizer_of(chunk, **settings(model, clip_grad=1.0)))


def _step(chunk: Any, optimizer: Any, round_: int) -> float:
    give_gradients(chunk, round_)
    return milliseconds(optimizer.step)


def _weights(made: tuple[Any, Any]) -> list[torch.Tensor]:
    return [param.detach().float().cpu() for param in made[0].parameters()]


def _largest(numbers: list[float]) -> float:
    """Return the largest number, or nan if any is nan."""
    return float(torch.tensor(numbers, dtype=torch.float64).max())


def bytes_of(arm: Arm, model: dict[str, Any]) -> int:
    """Return the bytes of a contestant's weights, gradients and optimizer state."""
    hidden, groups = model["hidden"], model["query_groups"] / model["heads"]
    matrices = model["layers"] * int((10 + 2 * groups) * hidden**2)
    others = 2 * model["vocabulary"] * hidden
    moments = 2 * others + (1 if arm.optimizer == "muon" else 2) * matrices
    return BYTES_OF_A_WEIGHT * (matrices + others) + BYTES_OF_A_MOMENT * moments


def _no_room(model: dict[str, Any]) -> str | None:
    """Return the reason if the contestants do not fit into free memory, else None."""
    needed = sum(bytes_of(arm, model) for arm in arms()) + _SPARE
    free = torch.cuda.mem_get_info()[0]
    if needed < free:
        return None
    return f"{free / 2**30:.0f} GiB free of {needed / 2**30:.0f}"
