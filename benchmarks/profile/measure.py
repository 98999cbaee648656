"""Profiles of steps and iterations, ours and the peer's in turn."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from benchmarks.newton_schulz.cases import theirs
from benchmarks.optimizer_step.arms import SECTIONS, Contestant, ProductsT
from benchmarks.profile.kinds import KINDS, profiled
from benchmarks.rounds import measured
from megatron_eopt.math import PrecisionT, orthogonalize
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron

SHAPES = ((512, 2048), (2048, 512), (1024, 4096))
PRECISIONS: dict[ProductsT, PrecisionT] = {"bf16": "medium", "fp32": "highest"}
WARM_UP = 2


def iterations(products: ProductsT, rounds: int) -> list[dict[str, Any]]:
    """Profile our iteration and emerging-optimizers'."""
    found, precision = [], PRECISIONS[products]
    for shape in SHAPES:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        sides = {
            "ours": partial(orthogonalize, x, precision=precision),
            "emerging-optimizers": partial(theirs, x, precision),
        }
        times = measured({name: _ignoring(work) for name, work in sides.items()}, rounds, WARM_UP)
        arms = {name: _summary([times[name]], [_gigaflops(work)]) for name, work in sides.items()}
        found.append({"name": "x".join(map(str, shape)), "arms": arms})
    return found


def steps(products: ProductsT, rounds: int, timeout: float) -> list[dict[str, Any]]:
    """Profile an optimizer step of every layout."""
    found = []
    for number, section in enumerate(tqdm(SECTIONS, unit="layout")):
        ranks = run_ranks(
            section.ranks, _on_rank, number, products, rounds, timeout=timeout, cpu=True
        )
        arms = {
            arm.name: _summary(
                [rank["times"][arm.name] for rank in ranks],
                [rank["gigaflops"][arm.name] for rank in ranks],
            )
            for arm in section.arms
        }
        found.append({"name": section.name, "arms": arms})
    return found


def _on_rank(number: int, products: ProductsT, rounds: int) -> dict[str, Any]:
    section = SECTIONS[number]
    initialize_megatron(tp=section.tp)
    contestants = {arm.name: Contestant(section, arm, products) for arm in section.arms}
    works = {name: partial(_step, contestant) for name, contestant in contestants.items()}
    times = measured(works, rounds, WARM_UP)
    counted = {name: _gigaflops(one.optimizer.step) for name, one in contestants.items()}
    return {"times": times, "gigaflops": counted}


def _step(contestant: Contestant, round_: int) -> dict[str, float]:
    contestant.set_gradients(round_)
    return profiled(contestant.optimizer.step)


def _ignoring(work: Callable[[], object]) -> Callable[[int], dict[str, float]]:
    return lambda round_: profiled(work)


def _summary(
    times: Sequence[Sequence[Mapping[str, float]]], gigaflops: Sequence[float]
) -> dict[str, Any]:
    """Return every kind's median over the rounds and the products' work, means of the ranks."""
    milliseconds = {
        kind: statistics.mean(statistics.median(one[kind] for one in rank) for rank in times)
        for kind in KINDS
    }
    return {"milliseconds": milliseconds, "gigaflops": statistics.mean(gigaflops)}


def _gigaflops(work: Callable[[], object]) -> float:
    with FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops() / 1e9)
