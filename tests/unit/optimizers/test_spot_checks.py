"""Spot checks: a flipped bit never gets into the weights, and clean steps raise no alarm."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import megatron_eopt
from megatron_eopt.base.errors import SpotCheckError
from megatron_eopt.config.config import EmergingOptimizerConfig
from megatron_eopt.contrib.spot_checks import SpotCheck
from megatron_eopt.storage.interface import finish_gathers
from tests.harness import run_ranks
from tests.harness.flips import KINDS, PLACES, Flip, flipping
from tests.harness.tiers import mostly_long
from tests.unit.storage.runs import (
    BF16,
    MOE,
    OVERLAP,
    PLAIN,
    SHARDED,
    Run,
    gradients,
    make_chunk,
    set_lr,
)

BESIDE = {"muon_overlap_dp_comm": True}
OFFLOADED = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "sharded": (3, {"ddp": SHARDED, "config": SHARDED}),
    "sharded and cut": (4, {"ddp": SHARDED, "config": SHARDED, "parallel": {"tp": 2}}),
    "replicated": (3, {"ddp": PLAIN, "config": PLAIN}),
    "in 16 bits": (3, {"ddp": SHARDED, **BF16, "config": SHARDED | BF16["config"]}),
    "beside communication": (3, {"ddp": SHARDED | OVERLAP, "config": SHARDED | BESIDE}),
    "off-loaded": (3, {"ddp": SHARDED, "config": SHARDED | OFFLOADED}),
    "in 8 bits": (3, {"ddp": SHARDED, "config": SHARDED | {"muon_momentum_dtype": "int8"}}),
    "experts": (4, {"ddp": SHARDED, "config": SHARDED, "parallel": {"ep": 2}, "model": MOE}),
    "replicated and cut": (4, {"ddp": PLAIN, "config": PLAIN, "parallel": {"tp": 4}}),
}


def build(run: Run, **fields: Any) -> tuple[Any, Any]:
    chunk = make_chunk(run)
    checked = {"muon_check_fraction": 1.0} | run.config | fields
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.01, min_lr=0.001, **checked)
    optimizer = megatron_eopt.get_megatron_optimizer(config, [chunk])
    set_lr(optimizer, config)
    return chunk, optimizer


def held(optimizer: Any) -> list[torch.Tensor]:
    """Copy weights and state."""
    tensors = list(optimizer.get_parameters())
    for child in optimizer.chained_optimizers:
        states = child.optimizer.state.values()
        tensors += [v for state in states for v in state.values() if isinstance(v, torch.Tensor)]
    return [tensor.detach().clone() for tensor in tensors]


def put_back(optimizer: Any, tensors: list[torch.Tensor]) -> None:
    source = iter(tensors)
    with torch.no_grad():
        for param in optimizer.get_parameters():
            param.copy_(next(source))
        for child in optimizer.chained_optimizers:
            for state in child.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        value.copy_(next(source))


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, a, b))


def stepped(run: Run, flips: list[Flip | None], late: bool = False) -> list[dict[str, Any]]:
    """Do the same step once for each flip; return what this rank saw.

    If it is read ``late``, the norm of the next step is asked for.
    """
    chunk, optimizer = build(run)
    optimizer.has_kernels = late
    gradients(run, chunk, optimizer, 0)
    assert optimizer.step()[0]
    finish_gathers([chunk])
    start, after = held(optimizer), []
    results = []
    for flip in [None, *flips]:
        put_back(optimizer, start)
        gradients(run, chunk, optimizer, 1)
        result: dict[str, Any] = {"error": None, "done": None}
        with flipping(flip) as done:
            try:
                result["done"] = optimizer.step()[0]
                optimizer.get_grad_norm()
            except SpotCheckError as error:
                result["error"] = str(error)
        finish_gathers([chunk])
        now = held(optimizer)
        after = after or now
        result |= {"right": same(now, after), "unchanged": same(now, start)}
        results.append(result | {"flipped": bool(done)})
    return results


def flips_of(ranks: int, calls: int) -> list[Flip | None]:
    """Return a flip of each kind, in each place and on each rank."""
    cases = [(place, kind, rank) for place in PLACES for kind in KINDS for rank in range(ranks)]
    return [Flip(*case, call=n % calls, seed=n) for n, case in enumerate(cases)]


@pytest.mark.parametrize(
    ("has_replicas", "prints", "said"),
    [
        (True, "aab", "rank 2 has other updates or momenta than most ranks"),
        (True, "baa", "rank 0 has other updates or momenta than most ranks"),
        (True, "aabca", "rank 2 and rank 3 has other updates or momenta than most ranks"),
        (True, "ab", "rank 0 and rank 1 have different updates or momenta"),
        (True, "aabb", "rank 0 and rank 1 and rank 2 and rank 3 have different updates or momenta"),
        (True, "abc", "rank 0 and rank 1 and rank 2 have different updates or momenta"),
        (False, "aba", "rank 4 and rank 3 computed different updates"),
        (False, "aab", "an update was changed on its way to the ranks that store it"),
    ],
)
def test_most_ranks_are_more_than_half(has_replicas, prints, said):
    check = object.__new__(SpotCheck)
    check._replicas = object() if has_replicas else None
    check._stacks = [
        SimpleNamespace(ranks=(0, 1), matrices=(5, 6)),
        SimpleNamespace(ranks=(4, 3), matrices=(7, 8)),
    ]
    check._named = lambda ranks: " and ".join(f"rank {rank}" for rank in ranks)
    assert check._what_differs(8, [(letter,) for letter in prints]) == said


@pytest.mark.parametrize("layout", mostly_long(LAYOUTS, "sharded", "replicated"))
def test_a_flipped_bit_does_not_get_into_the_weights(layout):
    ranks, fields = LAYOUTS[layout]
    flips = flips_of(ranks, 2)
    clean, *outcomes = zip(
        *run_ranks(ranks, stepped, Run(**fields), flips, timeout=300), strict=True
    )
    assert all(o["right"] and o["done"] for o in clean)
    for flip, of_ranks in zip(flips, outcomes, strict=True):
        errors = {o["error"] for o in of_ranks}
        # all ranks stop alike, before anything has changed; or the bit was rounded away
        assert len(errors) == 1, (flip, errors)
        assert all(o["unchanged"] if o["error"] else o["right"] for o in of_ranks), (flip, errors)
        if flip.place == "product":
            assert f"rank {flip.rank} (" in errors.pop(), flip
    # a rank that sends no messages gets none; a low bit of a direction may round away
    seen = sum(bool(of_ranks[0]["error"]) for of_ranks in outcomes)
    assert seen >= 0.6 * len(flips)


@pytest.mark.parametrize("late", [False, True])
def test_all_ranks_stop_before_anything_changes_and_can_go_on(late):
    ranks, fields = LAYOUTS["sharded"]
    flips: list[Flip | None] = [Flip("product", "sign", 1, 0, 0), None]
    clean, wrong, again = zip(*run_ranks(ranks, stepped, Run(**fields), flips, late), strict=True)
    for outcome in (*clean, *again):
        assert (outcome["done"], outcome["right"]) == (True, True)
    for outcome in wrong:
        assert outcome["unchanged"]
        assert "computed different updates. No weight" in outcome["error"]


def drawn(run: Run, steps: int) -> tuple[list[list[str]], set[str]]:
    """Return the matrices that each step has checked, and the names of all."""
    chunk, optimizer = build(run, muon_check_fraction=1 / steps)
    checks = [check for check, _ in optimizer.step_checks._checks]
    found = []
    for step in range(steps):
        gradients(run, chunk, optimizer, step)
        with mock.patch.object(SpotCheck, "forget"):
            assert optimizer.step()[0]
        found.append([check._matrices[n].name for check in checks for n in check._drawn])
        for check in checks:
            check.forget()
    return found, {name for check in checks for name in check.rule.exchange.names}


@pytest.mark.parametrize("buffer_mb", [64.0, 0.001])
def test_every_matrix_is_checked_once_in_a_cycle(buffer_mb):
    ranks, fields = LAYOUTS["sharded"]
    config = fields["config"] | {"matrix_buffer_mb": buffer_mb}
    results = run_ranks(ranks, drawn, Run(**fields | {"config": config}), 5)
    for of_steps, names in results:
        assert sorted(name for found in of_steps for name in found) == sorted(names)
        # if memory is short, a step checks a part of them
        assert (sum(map(bool, of_steps)) > 1) == (buffer_mb < 1)
