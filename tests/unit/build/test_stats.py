"""Statistics of watched steps are those of the whole weights, and cost nothing in other steps."""

import math
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed

import megatron_eopt
from megatron_eopt.build.stats import SAMPLED, _sample
from megatron_eopt.math.finite import NonFiniteError
from megatron_eopt.optimizers.step_stats import sample_of
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.unit.fsdp2 import test_megatron_wrapper
from tests.unit.megatron_fsdp import runs as megatron_fsdp
from tests.unit.stores.full_state import Case, build, steps
from tests.unit.stores.runs import DENSE, MOE, Run, inject

PACKAGE = Path(megatron_eopt.__file__).parent
MUON, ADAM = "TensorParallelMuon", "AdamW"
LR = 0.01

REPLICATED: dict[str, Any] = {
    "ddp": {"use_distributed_optimizer": False},
    "config": {"use_distributed_optimizer": False},
}
ONE_RANK = Case(model=DENSE, **REPLICATED)
EXPERTS = Case(model=MOE, **REPLICATED)
BARE = {"muon_split_qkv": False, "muon_split_gated": False}


def watched(case: Case, decay: float = 0.0) -> dict[str, float]:
    """Return the statistics of a second step."""
    case = with_config(case, weight_decay=decay, muon_fp32_matmul_prec="highest")
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 1)
    assert optimizer.stats() == {"optimizer/skipped-steps": 0}
    optimizer.watching = True
    steps(case, chunk, optimizer, 1, 2)
    found = optimizer.stats()
    assert optimizer.stats() == found
    return found


def rms(tensors: list[torch.Tensor]) -> float:
    every = torch.cat([tensor.double().flatten() for tensor in tensors])
    return math.sqrt(float(every.square().mean()))


def reference(case: Case) -> dict[str, float]:
    """Return the same of one process, in float64 from weights before and after the step."""
    case = with_config(case, weight_decay=0.0, muon_fp32_matmul_prec="highest")
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 1)
    driver = optimizer.members[0].drivers[0]
    own = {p for group in optimizer.members[0].groups_of(driver) for p in group["params"]}
    before = {param: param.detach().clone() for param in chunk.parameters()}
    steps(case, chunk, optimizer, 1, 2)
    updates = {p: (before[p].double() - p.double()) / LR for p in chunk.parameters()}
    others = [p for p in chunk.parameters() if p not in own]
    expected = {
        f"{MUON}/learning-rate": LR,
        f"{ADAM}/learning-rate": LR,
        f"{MUON}/weight-rms": rms(list(own)),
        f"{ADAM}/weight-rms": rms(others),
        f"{MUON}/update-rms": rms([updates[p] for p in own]),
        f"{ADAM}/update-rms": rms([updates[p] for p in others]),
    }
    if case.config.get("muon_split_qkv", True):
        return expected
    numbers = {number: param for _, param, number in driver.numbered(optimizer.param_groups[:1])}
    residuals = []
    for number in sample_of(len(numbers)):
        update = updates[numbers[number]]
        factor = update / driver.settings.orthogonalization.scale(tuple(update.shape))
        gram = factor.T @ factor if factor.shape[0] > factor.shape[1] else factor @ factor.T
        residuals.append(float((gram - torch.eye(len(gram))).norm()) / math.sqrt(len(gram)))
    expected[f"{MUON}/orthogonality-residual"] = sum(residuals) / len(residuals)
    return expected


def with_config(case: Case, **config: Any) -> Case:
    return Case(case.optimizer, case.model, case.parallel, case.ddp, case.config | config)


LAYOUTS = {
    "one rank": (1, ONE_RANK),
    "one rank, fragments": (1, Case(model=DENSE)),
    "replicas": (2, ONE_RANK),
    "two ranks, fragments": (2, Case(model=DENSE)),
    "tensor parallel, distributed": (
        2,
        Case(
            model=DENSE, parallel={"tp": 2}, ddp=REPLICATED["ddp"],
            config=REPLICATED["config"] | {"muon_tp_mode": "distributed"},
        ),
    ),
    "tensor-parallel ranks, fragments": (4, Case(model=DENSE, parallel={"tp": 2})),
}  # fmt: skip


def test_values_are_those_of_whole_weights_at_every_layout():
    bare = [reference_of(with_config(ONE_RANK, **BARE))]
    assert len(bare[0]) == 7
    for name, (world, case) in LAYOUTS.items():
        found = run_ranks(world, watched, with_config(case, **BARE))
        assert all(other == found[0] for other in found), name
        for what, value in bare[0].items():
            assert found[0][what] == pytest.approx(value, rel=1e-4), (name, what)
        assert (found[0][f"{MUON}/exchange-bytes"] > 0) == ("ranks, fragments" in name)
        for what in ("exchange-seconds", "orthogonalization-seconds"):
            assert 0 < found[0][f"{MUON}/{what}"] < 60


def reference_of(case: Case) -> dict[str, float]:
    found: dict[str, float] = run_ranks(1, reference, case)[0]
    return found


def sent_by_a_rank() -> None:
    """Compare the bytes that are told with those that the plans of both members send."""
    chunk, optimizer = build(case := Case(model=MOE, parallel={"ep": 2}))
    assert len(optimizer.members) == 2
    optimizer.watching = True
    steps(case, chunk, optimizer, 0, 1)
    told = optimizer.stats()[f"{MUON}/exchange-bytes"]
    drivers = [driver for member in optimizer.members for driver in member.drivers]
    plans = [one.plan for driver in drivers for one in driver.redistributions]
    sent = torch.tensor(float(sum(plan.bytes_sent for plan in plans)))
    distributed.all_reduce(sent)
    assert told == float(sent) / distributed.get_world_size() > 0


def test_bytes_of_dense_weights_and_of_experts_are_those_of_one_rank():
    run_ranks(4, sent_by_a_rank)


def test_experts_and_pieces_of_fused_weights_are_counted_once():
    for single, parallel in ((EXPERTS, {"ep": 2}), (ONE_RANK, {"tp": 2, "pp": 1})):
        expected = reference_of(single)
        found = run_ranks(2, watched, Case(model=single.model, parallel=parallel))[0]
        assert len(expected) == 6
        for what, value in expected.items():
            assert found[what] == pytest.approx(value, rel=1e-4), what


def test_newton_schulz_is_told_from_nothing():
    found = {}
    for number in (1, 5, 12):
        kind = "simple" if number < 6 else "polar_express"
        case = with_config(ONE_RANK, muon_coefficient_type=kind, muon_num_ns_steps=number)
        found[number] = run_ranks(1, watched, case)[0][f"{MUON}/orthogonality-residual"]
    assert found[1] > 0.5
    assert 0.1 < found[5] < 0.4
    assert found[12] < 0.02


def test_decay_is_no_part_of_an_update():
    plain, decayed = (run_ranks(1, watched, ONE_RANK, decay)[0] for decay in (0.0, 0.5))
    what = f"{MUON}/update-rms"
    assert plain[what] == pytest.approx(decayed[what], rel=1e-3)
    assert plain[f"{MUON}/weight-rms"] > 1.005 * decayed[f"{MUON}/weight-rms"]


def seen_and_done(case: Case) -> tuple[list[float], list[float]]:
    """Return the update RMS of each class, and how far parameters moved over the learning rate.

    The first step is that of a warm-up, with a learning rate of 0.
    """
    chunk, optimizer = build(with_config(case, log_optimizer_stats=True, weight_decay=0.0))
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    steps(case, chunk, optimizer, 0, 1)
    assert not any("update-rms" in name for name in optimizer.stats())
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    before = [param.detach().clone() for param in chunk.parameters()]
    steps(case, chunk, optimizer, 1, 2)
    moved = [(b - p.detach()) / LR for b, p in zip(before, chunk.parameters(), strict=True)]
    found = {name: value for name, value in optimizer.stats().items() if "update-rms" in name}
    return list(found.values()), [rms(moved)]


@pytest.mark.parametrize("name", ["adam", "sgd", "lion", "soap"])
def test_the_update_of_every_other_optimizer_is_what_weights_moved_by(name):
    # whole weights have owners in fragments alone, who would split fused ones
    bare = BARE if name == "soap" else {}
    case = with_config(Case(name, DENSE, **REPLICATED), **bare)
    ((whole, done),) = run_ranks(1, seen_and_done, case)
    if len(whole) == 1:
        assert whole == pytest.approx(done, rel=1e-4)
    else:
        assert min(whole) < done[0] < max(whole)
    for cut, _ in run_ranks(2, seen_and_done, with_config(Case(name, DENSE), **bare)):
        # float32 weights of about 0.02 that move by 0.01 of the update
        assert cut == pytest.approx(whole, rel=1e-3)


def test_a_large_weight_is_looked_at_in_all_of_its_columns():
    weight = torch.arange(1024 * 256).view(1024, 256)
    looked_at = _sample(weight)
    assert SAMPLED / 2 <= len(looked_at) <= 2 * SAMPLED
    assert set((looked_at % 256).tolist()) == set(range(256))
    small = torch.arange(SAMPLED - 1)
    assert torch.equal(_sample(small), small)
    assert _sample(torch.empty(0)).numel() == 0


def calls_of_a_step(case: Case, watching: bool) -> tuple[list[str], dict[str, int]]:
    """Return which of our functions a third step calls, and how often it calls collectives."""
    chunk, optimizer = build(case)
    for step in range(2):
        optimizer.watching = step == 1
        steps(case, chunk, optimizer, step, step + 1)
        optimizer.stats()
    optimizer.watching = watching
    optimizer.zero_grad()
    inject(case.run, chunk, 2)
    called = []

    def note(frame: Any, event: str, _arg: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            called.append(f"{path.relative_to(PACKAGE)}: {frame.f_code.co_qualname}")

    names = ("all_reduce", "all_gather_into_tensor", "all_to_all_single", "broadcast")
    with ExitStack() as stack:
        counted = {
            name: stack.enter_context(
                mock.patch.object(distributed, name, wraps=getattr(distributed, name))
            )
            for name in names
        }
        sys.setprofile(note)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
        if watching:
            optimizer.stats()
    return called, {name: counter.call_count for name, counter in counted.items()}


def test_a_step_that_is_not_watched_is_one_without_the_flag():
    plain = Case(model=DENSE)
    flagged = with_config(plain, log_optimizer_stats=True)
    runs = ((plain, False), (flagged, False), (flagged, True))
    without, unwatched, seen = (run_ranks(2, calls_of_a_step, *run)[0] for run in runs)
    assert unwatched == without
    assert "base/meter.py: Meter.span" in set(seen[0]) - set(without[0])
    # all sums of all ranks travel together
    assert seen[1] == without[1] | {"all_reduce": without[1]["all_reduce"] + 1}


def weights(case: Case) -> list[torch.Tensor]:
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 2)
    return [param.detach().clone() for param in chunk.parameters()]


def test_watching_changes_no_bit():
    plain, flagged = (
        run_ranks(2, weights, with_config(Case(model=DENSE), log_optimizer_stats=flag))[0]
        for flag in (False, True)
    )
    assert all(map(torch.equal, plain, flagged))


def skips() -> list[tuple[float, bool]]:
    """Return the steps skipped so far, and whether an update was seen, after each of three."""
    case = Case(model=DENSE, config={"log_optimizer_stats": True, "grad_norm_skip_threshold": 1e4})
    chunk, optimizer = build(case)
    found = []
    for step, factor in enumerate((1.0, 1e6, 1.0)):
        optimizer.zero_grad()
        inject(case.run, chunk, step)
        for param in chunk.parameters():
            param.main_grad.mul_(factor)
        optimizer.step()
        stats = optimizer.stats()
        updated = {name for name in (MUON, ADAM) if f"{name}/update-rms" in stats}
        assert len(updated) in (0, 2)
        found.append((stats["optimizer/skipped-steps"], bool(updated)))
    return found


def test_a_step_that_is_skipped_is_counted_and_has_no_update():
    for found in run_ranks(2, skips):
        assert found == [(0, True), (1, False), (1, True)]


def overflows(dtype: torch.dtype) -> float:
    """Return the steps skipped after one whose gradients are not finite, on one rank of them."""
    half = {"fp16": True} if dtype == torch.float16 else {}
    case = Case(model={**DENSE, "dtype": dtype}, config={"log_optimizer_stats": True, **half})
    chunk, optimizer = build(case)
    inject(case.run, chunk, 0)
    for param in chunk.parameters():
        param.main_grad.fill_(math.inf)
    try:
        assert not optimizer.step()[0]
    except NonFiniteError:
        assert dtype == torch.float32
    return float(optimizer.stats()["optimizer/skipped-steps"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_gradients_that_are_not_finite_are_a_skipped_step(dtype):
    assert run_ranks(2, overflows, dtype) == [1, 1]


def test_a_matrix_is_in_the_sample_of_every_layout():
    assert sample_of(3) == {0, 1, 2}
    assert sample_of(100) == {0, 25, 50, 75}


def of_dtensors(kind: str) -> tuple[dict[str, float], dict[str, tuple[float, int]]]:
    """Return statistics under FSDP, and each class's sum of squares here, with its elements."""
    if kind == "torch":
        initialize_megatron()
        chunk, optimizer = test_megatron_wrapper.build()
        test_megatron_wrapper.set_gradients(chunk)
    else:
        run = Run(model=DENSE, config={"optimizer": "muon"})
        chunk = megatron_fsdp.make_chunk(run)
        optimizer = megatron_fsdp.make_optimizer(run, chunk)
        megatron_fsdp.inject(run, chunk, 0)
    optimizer.watching = True
    optimizer.step()
    inner = optimizer.members[0].storage.optimizer
    held: dict[str, tuple[float, int]] = {}
    for driver in inner.drivers:
        params = inner.params_of(driver)
        squares = sum(float(p.to_local().double().square().sum()) for p in params)
        known = held.get(driver.name, (0.0, 0))
        held[driver.name] = known[0] + squares, known[1] + sum(p.numel() for p in params)
    return optimizer.stats(), held


@pytest.mark.parametrize("kind", ["torch", "megatron"])
def test_shards_of_both_kinds_of_fsdp_are_counted_once(kind):
    (stats, first), (_, second) = run_ranks(2, of_dtensors, kind)
    assert len(first) == 2
    for name, (squares, elements) in first.items():
        expected = math.sqrt((squares + second[name][0]) / elements)
        assert stats[f"{name}/weight-rms"] == pytest.approx(expected, rel=1e-5)
    # the update of an orthogonal matrix, scaled as all are
    assert 0.1 < stats[f"{MUON}/update-rms"] < 2
