"""Parameters with different counts of steps, within an optimizer and between optimizers."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_eopt import EmergingOptimizerEntry, checkpoints
from megatron_eopt.config.registry import registered
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.tiers import mostly_long
from tests.unit.fsdp2.models import eager
from tests.unit.storage import full_state
from tests.unit.storage.full_state import Case, counts_of, differences, resume
from tests.unit.storage.runs import DENSE, REPLICATED

EARLY, LATE = "*linear_proj.weight", "*input_layernorm*"
FROZEN = "final_layernorm"
MATRICES = ("linear_proj.weight", "linear_qkv.weight", "linear_fc1.weight", "linear_fc2.weight")


def before(case: Case) -> Case:
    """Return the run before, of Lion: few parameters have the optimizer that they have later.

    Matrices have another one except EARLY ones, LATE vectors too, and FROZEN ones have none.
    """
    others = {LATE: "lion", EARLY: case.optimizer}
    return replace(case, optimizer="lion", overrides=others, frozen=FROZEN)


def expected(name: str, first: str, steps: int) -> int:
    """Return a parameter's count after 8 steps of the first run and some of the second."""
    is_matrix = name.endswith(MATRICES)
    is_new = (is_matrix and first not in name) or "input_layernorm" in name or FROZEN in name
    return steps if is_new else 8 + steps


def after_joining(case: Case, folder: Path, first: Case | None = None) -> tuple[Any, Any]:
    """Return a run in which most parameters, whose optimizer was another, do steps 8 and 9."""
    full_state.save_one(first or before(case), folder / "before", 8)
    forget_megatron()
    chunk, optimizer = resume(case, folder / "before")
    full_state.steps(case, chunk, optimizer, 8, 10)
    return chunk, optimizer


def adaptive(method: str, **fields: Any) -> Case:
    config = {"adaptive_muon_moment2_method": method, "adaptive_muon_bias_correction": True}
    return Case("adaptive_muon", DENSE, config=config | fields)


def plain(case: Case) -> Case:
    return replace(case, ddp=REPLICATED["ddp"], config=case.config | REPLICATED["config"])


CASES = {
    "AdaMuon": adaptive("adamuon"),
    "NorMuon": adaptive("normuon"),
    "NAMO": adaptive("namo"),
    "rounded": adaptive("namo", muon_momentum_dtype="int8"),
    "SOAP": Case("soap", DENSE),
    "Adam": Case("adam", DENSE),
    "NAMO, replicated": plain(adaptive("namo")),
    "SOAP, replicated": plain(Case("soap", DENSE)),
    "Adam, replicated": plain(Case("adam", DENSE)),
}


def check(counts: dict[str, int], steps: int, first: str = "linear_proj") -> None:
    assert len(counts) > 10
    assert counts == {name: expected(name, first, steps) for name in counts}
    assert set(counts.values()) == {steps, 8 + steps}


WAYS = [
    *((name, "torch_dist") for name in CASES),
    *((name, "state_dict") for name in CASES if "replicated" in name),
]
USUAL = [("AdaMuon", "torch_dist"), ("SOAP, replicated", "torch_dist")]
USUAL += [("NAMO, replicated", "state_dict")]


@pytest.mark.parametrize(("name", "form"), mostly_long(WAYS, *USUAL))
@on_ranks(2)
@eager
def test_counts_of_steps_go_on_as_they_were(tmp_path, name, form):
    """Two more steps from a checkpoint are those of a run that was not interrupted."""
    case = CASES[name]
    chunk, optimizer = after_joining(case, tmp_path)
    check(counts_of(chunk, optimizer), 2)
    weights = full_state.write_as(form, case, chunk, optimizer, tmp_path)
    full_state.steps(case, chunk, optimizer, 10, 12)
    whole = full_state.full_state(case, chunk, optimizer)
    check(counts_of(chunk, optimizer), 4)
    forget_megatron()
    chunk, optimizer = full_state.resume_as(form, case, tmp_path, weights)
    check(counts_of(chunk, optimizer), 2)
    assert {part.steps for part in optimizer.chained_optimizers} == {10}
    full_state.steps(case, chunk, optimizer, 10, 12)
    check(counts_of(chunk, optimizer), 4)
    assert not differences(whole, full_state.full_state(case, chunk, optimizer))


@eager
def saved(case: Case, folder: Path) -> dict[str, Any]:
    chunk, optimizer = after_joining(case, folder)
    full_state.write(case, chunk, optimizer, folder / "own")
    return full_state.full_state(case, chunk, optimizer)


@eager
def loaded(case: Case, folder: Path) -> tuple[dict[str, int], dict[str, Any]]:
    chunk, optimizer = resume(case, folder / "own")
    return counts_of(chunk, optimizer), full_state.full_state(case, chunk, optimizer)


@pytest.mark.parametrize(
    ("name", "ranks", "parallel"),
    [
        ("NAMO", 2, {"tp": 2}),
        ("SOAP", 1, {}),
        pytest.param("Adam", 2, {"pp": 2}, marks=pytest.mark.long),
        pytest.param("NAMO, replicated", 2, {"tp": 2}, marks=pytest.mark.long),
        pytest.param("rounded", 2, {"tp": 2}, marks=pytest.mark.long),
        pytest.param("Adam, replicated", 2, {"pp": 2}, marks=pytest.mark.long),
    ],
)
def test_another_layout_has_the_same_counts(tmp_path, name, ranks, parallel):
    case = CASES[name]
    whole, _ = run_ranks(2, saved, case, tmp_path)
    for counts, found in run_ranks(ranks, loaded, replace(case, parallel=parallel), tmp_path):
        check(counts, 2)
        assert not differences(whole, found)


@eager
def counts_after(first: Case, second: Case, third: Case, folder: Path) -> dict[str, int]:
    """Return the counts that a third run loads from a second one, which goes on from the first."""
    full_state.write(second, *after_joining(second, folder, first), folder / "own")
    forget_megatron()
    return counts_of(*resume(third, folder / "own"))


@pytest.mark.parametrize("name", mostly_long(["NAMO", "NAMO, replicated"], "NAMO"))
def test_groups_that_are_new_count_on(tmp_path, name):
    """Matrices, all new to the second run, get a learning rate of their own in the third."""
    case = CASES[name]
    first = Case("lion", case.model, ddp=case.ddp)
    third = replace(case, config=case.config | {"muon_lr": 0.02})
    for counts in run_ranks(2, counts_after, first, case, third, tmp_path):
        assert counts == {n: 2 if n.endswith(MATRICES) else 10 for n in counts}
        assert set(counts.values()) == {2, 10}


LAST = "decoder.layers.1.mlp.linear_fc2.weight"
ON_ONE_STAGE = replace(
    adaptive("namo"), optimizer="lion", overrides={f"*{LAST}": "adaptive_muon"}, parallel={"pp": 2}
)


@pytest.mark.parametrize("case", [ON_ONE_STAGE, plain(ON_ONE_STAGE)], ids=["sharded", "replicated"])
def test_an_optimizer_that_one_pipeline_stage_has_counts_on(tmp_path, case):
    first = replace(case, overrides={})
    for counts in run_ranks(2, counts_after, first, case, case, tmp_path):
        assert counts == {name: 2 if name == LAST else 10 for name in counts}
        assert set(counts.values()) == {2, 10}


class Averaging(torch.optim.Optimizer):
    """Counts in its groups, keeps a number beside a tensor, and assigns weights."""

    key = "sum"

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                state = self.state[param]
                state["size"] = float(param.grad.abs().sum()) + state.get("size", 0.0)
                state[self.key] = state.get(self.key, 0.0) + param.grad
                scale = group["lr"] / group["step"] / (1 + state["size"])
                param.data = param - scale * state[self.key]


class Named(Averaging):
    """Its tensors are called as checkpoints call main weights."""

    key = "param"


@pytest.mark.parametrize("cls", [Averaging, Named])
@pytest.mark.parametrize("wrap", [replace, plain])
@on_ranks(1)
def test_counts_of_groups_and_numbers_of_a_users_own_optimizer(tmp_path, wrap, cls):
    # whole matrices at an owner have keys of their own
    is_refused = cls is Named and wrap is plain
    told = "state='param': is the name of main weights"
    with registered("averaging", EmergingOptimizerEntry(cls, lambda *_: None)):
        case = wrap(Case("averaging", DENSE))
        with pytest.raises(ValueError, match=told) if is_refused else nullcontext():
            _, whole = full_state.stopped([case], str(tmp_path))
            resumed = full_state.load([case], str(tmp_path), 2, checkpoints.load)
            assert not differences(whole[0], resumed[0])
            assert whole[0] != {}
