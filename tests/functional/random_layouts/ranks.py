"""What each rank does with a draw: it builds its part of the model, trains, saves and goes on."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.functional.random_layouts.draws import STEPS, TRAINERS, Draw
from tests.functional.random_layouts.megatron_run import MegatronRun
from tests.functional.random_layouts.models import Run, Weights
from tests.functional.random_layouts.own_run import OwnRun
from tests.unit.fsdp2.models import eager

NORM_TOLERANCE = 1e-5
"""Relative; norms are sums of thousands of float32 numbers."""


@eager
def train(draw: Draw, folder: str, expected: Weights, norms: list[float]) -> list[str]:
    """Take the first steps and save; return what is not as expected."""
    run = run_at(draw, 0)
    problems = list(_stepped(run, 0, STEPS[0], norms))
    problems += run.differences(expected)
    run.save(Path(folder))
    return problems


@eager
def resume(draw: Draw, folder: str, expected: Weights, norms: list[float]) -> list[str]:
    """Load at the other layout and take the other steps; return what is not as expected."""
    run = run_at(draw, 1)
    # what has stepped must forget that
    run.set_gradients(0)
    run.step()
    with torch.no_grad():
        for _, param in run.params.values():
            # so that only what is loaded can be right
            getattr(param, "_local_tensor", param).zero_()
    run.load(Path(folder))
    problems = list(_stepped(run, STEPS[0], sum(STEPS), norms))
    return problems + run.differences(expected)


def _stepped(run: Run, first: int, stop: int, norms: list[float]) -> Iterator[str]:
    for step in range(first, stop):
        run.set_gradients(step)
        norm = run.step()
        if norm is not None and not math.isclose(norm, norms[step], rel_tol=NORM_TOLERANCE):
            yield f"step {step}: norm of gradients {norm}, not {norms[step]}"


def run_at(draw: Draw, number: int) -> Run:
    """Return a new run at one of a draw's layouts."""
    layout = draw.layouts[number]
    cls = MegatronRun if layout.storage in TRAINERS[0] else OwnRun
    return cls(draw, layout)
