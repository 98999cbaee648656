"""Adam classes that count steps in parameter groups, as Transformer Engine's and Apex's do."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer

from megatron_eopt.testing.scene import forget_megatron
from tests.harness.each_rank import on_ranks
from tests.harness.models import copies_of
from tests.harness.tiers import mostly_long
from tests.unit.storage import full_state, runs
from tests.unit.storage.full_state import Case, build, differences, steps
from tests.unit.storage.runs import REPLICATED, Run
from tests.unit.storage.test_off_load import SMALL, at

BEFORE, AFTER = 2, 4
"""Few steps, because the bias correction of the first ones depends most on their count."""


class FusedAdam(torch.optim.Optimizer):
    """Stands for a fused class: it counts steps in groups, and skips groups without parameters."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode
        assert not capturable
        fields = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**fields, "bias_correction": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            one, two = (1 - beta ** group["step"] for beta in group["betas"])
            for param in group["params"]:
                state = self.state[param]
                for kind in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(kind, torch.zeros_like(param))
                if param.grad is None:
                    continue
                state["exp_avg"].lerp_(param.grad, 1 - group["betas"][0])
                state["exp_avg_sq"].lerp_(param.grad.square(), 1 - group["betas"][1])
                root = (state["exp_avg_sq"] / two).sqrt() + group["eps"]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.addcdiv_(state["exp_avg"] / one, root, value=-group["lr"])


FusedAdam.__module__ = "transformer_engine.pytorch.optimizers.fused_adam"


@contextmanager
def installed() -> Iterator[None]:
    """Let megatron-core and this package find the class, as if its package were there."""
    places = (megatron_optimizer, distrib_optimizer)
    told = {megatron_optimizer: {"USING_PYTORCH_OPTIMIZER": False}}
    told[distrib_optimizer] = {"HAVE_APEX_OR_TE": True, "USING_TE_OPTIMIZER": True}
    patches = [mock.patch.multiple(p, create=True, Adam=FusedAdam, **told[p]) for p in places]
    with patches[0], patches[1]:
        yield


def counts_of(optimizer: Any) -> set[int]:
    """Return the counts of groups with parameters, all of which must have stepped alike."""
    groups = [group for group in optimizer.param_groups if group["params"]]
    assert groups
    return {group["step"] for group in groups if group.get("optimizer", "adam") == "adam"}


def younger(case: Case) -> tuple[Any, Any]:
    """Return a run that has done three steps in which Adam had nothing to do."""
    chunk, optimizer = build(case)
    for part in optimizer.chained_optimizers:
        part.steps = 3
    return chunk, optimizer


MODEL = {"layers": 1, "bias": True, "dtype": torch.bfloat16}
LARGE = Case("muon", {**MODEL, "vocabulary": 512}, config=SMALL)
"""Adam's fragments are more than one chunk."""

OFF_LOADED = at(LARGE, torch.bfloat16, 1.0)


def anew(case: Case) -> tuple[Any, Any]:
    return build(case)


USUAL = [
    ("state_dict", Case("muon", MODEL, **REPLICATED), anew),
    ("torch_dist", OFF_LOADED, younger),
    ("torch_dist", Case("muon", MODEL), anew),
]
OTHERS = [
    ("state_dict", Case("adam", MODEL, **REPLICATED), anew),
    ("torch_dist", OFF_LOADED, anew),
    ("torch_dist", Case("adam", MODEL), younger),
    ("torch_dist", Case("muon", MODEL, **REPLICATED), younger),
]


@pytest.mark.parametrize(("form", "case", "start"), mostly_long([*USUAL, *OTHERS], *USUAL))
@on_ranks(2)
def test_a_run_goes_on_with_its_counts(tmp_path, form, case, start):
    with installed():
        chunk, optimizer = start(case)
        steps(case, chunk, optimizer, 0, BEFORE)
        assert counts_of(optimizer) == {BEFORE}
        weights = full_state.write_as(form, case, chunk, optimizer, tmp_path)
        steps(case, chunk, optimizer, BEFORE, AFTER)
        whole = full_state.full_state(case, chunk, optimizer)
        forget_megatron()
        chunk, optimizer = full_state.resume_as(form, case, tmp_path, weights)
        assert counts_of(optimizer) == {BEFORE}
        steps(case, chunk, optimizer, BEFORE, AFTER)
        assert counts_of(optimizer) == {AFTER}
        assert not differences(whole, full_state.full_state(case, chunk, optimizer))


def trained(case: Case, *, with_fused: bool = True) -> tuple[dict[str, Any], set[int]]:
    with installed() if with_fused else nullcontext():
        chunk, optimizer = build(case)
        steps(case, chunk, optimizer, 0, AFTER)
        counts = counts_of(optimizer) if with_fused else set()
        state = full_state.full_state(case, chunk, optimizer)
    forget_megatron()
    return state, counts


@on_ranks(2)
def test_each_chunk_that_is_off_loaded_does_the_same_step():
    (one, counts), (other, others) = (
        trained(at(LARGE, torch.bfloat16, share)) for share in (0.0, 1.0)
    )
    assert not differences(one, other)
    assert counts == others == {AFTER}


@pytest.mark.parametrize("to_fused", [True, False], ids=["to groups", "to states"])
@pytest.mark.parametrize(
    ("form", "case"),
    [("torch_dist", Case("muon", MODEL)), ("state_dict", Case("muon", MODEL, **REPLICATED))],
)
@on_ranks(2)
def test_the_count_goes_over_from_one_class_to_another(tmp_path, form, case, to_fused):
    """Compare a run with torch's Adam, and one whose class changes in between."""
    whole, _ = trained(case, with_fused=False)
    weights: Any = None
    for is_fused, first, end in ((not to_fused, 0, BEFORE), (to_fused, BEFORE, AFTER)):
        with installed() if is_fused else nullcontext():
            if first:
                chunk, optimizer = full_state.resume_as(form, case, tmp_path, weights)
            else:
                chunk, optimizer = build(case)
            steps(case, chunk, optimizer, first, end)
            if not first:
                weights = full_state.write_as(form, case, chunk, optimizer, tmp_path)
            state = full_state.full_state(case, chunk, optimizer)
        forget_megatron()
    assert whole.keys() == state.keys()
    for key, value in whole.items():
        # a wrong count is seen in the second digit
        torch.testing.assert_close(state[key], value, rtol=1e-2, atol=1e-4, msg=key)


def of_a_caller(case: Case, _: None = None) -> tuple[Any, Any]:
    """Return a model and an optimizer over what a caller has made."""
    run = Run("muon", case.model, config={"bf16": True})
    chunk = runs.make_chunk(run)
    config = runs.make_config(run)
    matrices, others = runs.param_groups(run, config, chunk)
    own = [runs.muon_over(matrices, config, chunk), FusedAdam(others, lr=config.lr)]
    return chunk, runs.make_optimizer(run, chunk, config=config, bases=own)


@on_ranks(2)
def test_an_optimizer_that_a_caller_has_made(tmp_path):
    """Compare a run in one go, and one that stops between."""
    case, found = Case("muon", {**MODEL, "query_groups": 2}), []
    with installed():
        for first, end in ((0, AFTER), (0, BEFORE), (BEFORE, AFTER)):
            run = (
                full_state.resume(case, tmp_path, make=of_a_caller) if first else of_a_caller(case)
            )
            steps(case, *run, first, end)
            found.append((counts_of(run[1]), copies_of(full_state.unwrapped(run[0]))))
            if end == BEFORE:
                full_state.write(case, *run, tmp_path)
            forget_megatron()
    (whole, weights), _, (resumed, others) = found
    assert whole == resumed == {AFTER}
    assert not differences(weights, others)
