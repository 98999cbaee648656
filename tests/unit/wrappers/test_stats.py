"""Statistics of watched steps are those of the whole weights, and cost nothing in other steps."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.megatron import initialize_megatron
from tests.unit.fsdp2 import test_megatron_wrapper
from tests.unit.megatron_fsdp import runs as megatron_fsdp
from tests.unit.storage.full_state import Case, build, steps
from tests.unit.storage.runs import DENSE, MOE, REPLICATED, Run, inject

MUON, ADAM = "TensorParallelMuon", "AdamW"
LR = 0.01

BARE = {"muon_split_qkv": False, "muon_split_gated": False}


def watched(case: Case) -> dict[str, float]:
    """Return the statistics of a second step."""
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 1)
    assert optimizer.stats() == {"optimizer/skipped-steps": 0}
    optimizer.collects_stats = True
    steps(case, chunk, optimizer, 1, 2)
    found = optimizer.stats()
    assert optimizer.stats() == found
    return found


def rms(tensors: list[torch.Tensor]) -> float:
    every = torch.cat([tensor.double().flatten() for tensor in tensors])
    return math.sqrt(float(every.square().mean()))


def reference(case: Case) -> dict[str, float]:
    """Return the same of one process, in float64 from weights before and after the step."""
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 1)
    own = set(optimizer.chained_optimizers[0].update_rules[0].params)
    before = {param: param.detach().clone() for param in chunk.parameters()}
    steps(case, chunk, optimizer, 1, 2)
    updates = {p: (before[p].double() - p.double()) / LR for p in chunk.parameters()}
    others = [p for p in chunk.parameters() if p not in own]
    return {
        f"{MUON}/learning-rate": LR,
        f"{ADAM}/learning-rate": LR,
        f"{MUON}/weight-rms": rms(list(own)),
        f"{ADAM}/weight-rms": rms(others),
        f"{MUON}/update-rms": rms([updates[p] for p in own]),
        f"{ADAM}/update-rms": rms([updates[p] for p in others]),
    }


def exact(case: Case, **config: Any) -> Case:
    exact = {"weight_decay": 0.0, "muon_fp32_matmul_prec": "highest"}
    return replace(case, config=case.config | exact | config)


ONE_RANK, EXPERTS = (exact(Case(model=model, **REPLICATED)) for model in (DENSE, MOE))
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


def check(expected: dict[str, float], ranks: int, case: Case) -> dict[str, float]:
    """Compare statistics with what they should be, and return them, the same of all ranks."""
    found, *others = run_ranks(ranks, watched, case)
    assert all(other == found for other in others), case
    assert len(expected) == 6
    for what, value in expected.items():
        assert found[what] == pytest.approx(value, rel=1e-4), (case, what)
    return found


def test_values_are_those_of_whole_weights_at_every_layout():
    (expected,) = run_ranks(1, reference, exact(ONE_RANK, **BARE))
    for name, (ranks, case) in LAYOUTS.items():
        found = check(expected, ranks, exact(case, **BARE))
        assert (found[f"{MUON}/exchange-bytes"] > 0) == ("ranks, fragments" in name)
        for what in ("exchange-seconds", "orthogonalization-seconds"):
            assert 0 < found[f"{MUON}/{what}"] < 60


def test_experts_and_pieces_of_fused_weights_are_counted_once():
    for single, parallel in ((EXPERTS, {"ep": 2}), (ONE_RANK, {"tp": 2})):
        (expected,) = run_ranks(1, reference, single)
        check(expected, 2, exact(Case(model=single.model, parallel=parallel)))


def weights_of_steps(case: Case, watching: bool) -> list[torch.Tensor]:
    chunk, optimizer = build(case)
    optimizer.collects_stats = watching
    steps(case, chunk, optimizer, 0, 3)
    return [param.detach().clone() for param in chunk.parameters()]


def test_a_watched_step_is_one_that_is_not():
    seen, plain = (run_ranks(2, weights_of_steps, Case(model=DENSE), on)[0] for on in (True, False))
    assert all(map(torch.equal, seen, plain))


def sent_bytes(config: dict[str, Any]) -> float:
    """Return how many bytes a step has sent to compute matrices; it overlaps nothing itself."""
    flags = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 3000}
    case = Case(model=DENSE, ddp={"use_distributed_optimizer": True, **flags}, config=config)
    chunk, optimizer = build(case)
    optimizer.collects_stats = True
    steps(case, chunk, optimizer, 0, 1)
    return optimizer.stats()[f"{MUON}/exchange-bytes"]


def test_all_windows_of_an_overlapped_step_are_measured():
    gathers = {"overlap_param_gather": True}
    plain = run_ranks(2, sent_bytes, gathers)
    overlapped = run_ranks(2, sent_bytes, gathers | {"muon_overlap_dp_comm": True})
    # matrices have other owners in windows, but all of them are sent somewhere
    assert sum(overlapped) > 0.5 * sum(plain) > 0


@on_ranks(2)
def test_a_step_that_is_skipped_is_counted_and_has_no_update():
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
    assert found == [(0, True), (1, False), (1, True)]


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
    optimizer.collects_stats = True
    optimizer.step()
    held: dict[str, tuple[float, int]] = {}
    for update_rule in optimizer.chained_optimizers[0].optimizer.update_rules:
        params = update_rule.params
        squares = sum(float(p.to_local().double().square().sum()) for p in params)
        known = held.get(update_rule.name, (0.0, 0))
        held[update_rule.name] = known[0] + squares, known[1] + sum(p.numel() for p in params)
    return optimizer.stats(), held


@pytest.mark.parametrize("kind", ["torch", "megatron"])
def test_shards_of_both_kinds_of_fsdp_are_counted_once(kind):
    (stats, first), (_, second) = run_ranks(2, of_dtensors, kind)
    assert len(first) == 2
    for name, (squares, elements) in first.items():
        expected = math.sqrt((squares + second[name][0]) / elements)
        assert stats[f"{name}/weight-rms"] == pytest.approx(expected, rel=1e-5)
    # the update of an orthogonal matrix, scaled as all are
    assert 0.02 < stats[f"{MUON}/update-rms"] < 0.4
