"""State as ``state_dict`` returns it, and as ``--ckpt-format torch`` keeps it."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.config.registry import optimizer_names
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.harness.tiers import mostly_long
from tests.unit.storage.full_state import (
    Case,
    build,
    differences,
    full_state,
    resume_as,
    steps,
    write_as,
)
from tests.unit.storage.runs import DENSE, PLAIN
from tests.unit.wrappers.test_plain_checkpoint import ADAPTIVE, BF16, SMALL, plain

MODEL = {**DENSE, "hidden": 48}
IN_BF16 = [
    *(plain(name, BF16) for name in ("muon", "soap", "lion", "adam", "sgd")),
    *ADAPTIVE,
    replace(plain("muon", BF16), float32="norm"),
]


IN_FEW_BITS = [
    Case("muon", MODEL, {"tp": 2}, PLAIN, {**PLAIN, "muon_momentum_dtype": dtype})
    for dtype in ("bf16", "fp8", "int8")
]
CASES = {
    "some, fp32": (1, [plain(name) for name in ("adam", "soap", "adaptive_muon")]),
    "plain, fp32": (1, [plain(name) for name in optimizer_names()]),
    "plain, bf16": (1, IN_BF16),
    "muon in bf16": (1, IN_BF16[:1]),
    "few bits on two ranks": (2, IN_FEW_BITS),
}


def gone_on(cases: list[Case], folder: str) -> None:
    """Compare four steps in one go with two and two, the state going through a file between."""
    for number, case in enumerate(cases):
        place = Path(folder, str(number))
        place.mkdir(exist_ok=True)
        chunk, optimizer = build(case)
        steps(case, chunk, optimizer, 0, 2)
        weights = write_as("state_dict", case, chunk, optimizer, place)
        steps(case, chunk, optimizer, 2, 4)
        whole = full_state(case, chunk, optimizer)
        forget_megatron()
        chunk, optimizer = resume_as("state_dict", case, place, weights)
        steps(case, chunk, optimizer, 2, 4)
        assert not differences(whole, full_state(case, chunk, optimizer)), case
        forget_megatron()


@pytest.mark.parametrize(
    "name", mostly_long(CASES, "muon in bf16", "few bits on two ranks", "some, fp32")
)
def test_state_continues(tmp_path, name):
    ranks, cases = CASES[name]
    run_ranks(ranks, gone_on, cases, str(tmp_path), timeout=300)


def _refusals() -> None:
    muon, adam = plain("muon"), plain("adam")
    states = {"muon": build(muon)[1].state_dict(), "adam": build(adam)[1].state_dict()}
    # three groups of Adam, where two are wanted, and no names of their parameters
    regrouped = build(plain("adam", decoupled_lr=0.1))[1].state_dict()
    del regrouped["param_names"]
    nameless = {key: value for key, value in states["adam"].items() if key != "param_names"}
    # as many elements in another shape
    turned = copy.deepcopy(states["adam"])
    moments = next(kept for kept in turned["state"].values() if len({*kept["exp_avg"].shape}) == 2)
    moments["exp_avg"] = moments["exp_avg"].mT
    wrong = [
        (muon, nameless, "state of 1 optimizers"),
        (adam, regrouped, "has .'adam/dense/"),
        (adam, turned, "exp_avg of shape"),
    ]
    for case, state, words in wrong:
        with pytest.raises(ConfigurationError, match=words):
            build(case)[1].load_state_dict(state)


def test_state_that_does_not_fit_is_refused():
    run_ranks(1, _refusals)


def _other_rates() -> None:
    """Groups keep their identity over a resume, also with another learning rate."""
    dtypes = (torch.float32, torch.bfloat16)
    cases = [
        plain(name, {**SMALL, "dtype": dtype}, decoupled_lr=0.02)
        for dtype in dtypes
        for name in ("adam", "muon")
    ]
    for case in (*cases, replace(cases[0], stock=True)):
        chunk, saved = build(case)
        for group in saved.param_groups:
            group["lr"] = group["max_lr"]
        steps(case, chunk, saved, 0, 1)
        state = copy.deepcopy(saved.state_dict())
        before = str(state)
        lr = 0.01 if case.stock else 0.05
        config = {**case.config, "lr": lr, "decoupled_lr": 2 * lr}
        _, resumed = build(replace(case, stock=False, config=config))
        resumed.load_state_dict(state)
        assert str(state) == before
        assert {group["max_lr"] for group in resumed.param_groups} == {lr, 2 * lr}
        # the checkpoint's, but this run's override, which begins where the schedule has come to
        assert {group["lr"] for group in resumed.param_groups} == {0.01, 2 * lr}
        forget_megatron()


def test_resume_with_another_learning_rate():
    run_ranks(1, _other_rates)


def around_dictionaries(case: Case) -> None:
    """Save and load the state of the optimizer in a chain, as a user's own code does."""
    chunk, chain = build(case)
    steps(case, chunk, chain, 0, 2)
    (member, *_) = chain.chained_optimizers
    inner = member.optimizer
    (first, *_) = inner.state
    kept = {kind: tensor.clone() for kind, tensor in inner.state[first].items()}
    saved = inner.state_dict()
    assert saved["state"][0]["momentum_buffer"].dtype == torch.float32
    inner.load_state_dict(saved)
    (loaded, *_) = inner.state
    assert inner.state[loaded].keys() == kept.keys()
    assert inner.state[loaded]["momentum_buffer"].dtype == kept["momentum_buffer"].dtype
    # megatron-core's wrapper calls it before it loads
    member.init_state_fn(inner, member.config)
    inner.state.clear()
    assert not inner.state_dict()["state"]
    assert not inner.state
    new = torch.nn.Parameter(torch.ones(4, 4))
    inner.param_groups[0]["params"].append(new)
    with pytest.raises(ConfigurationError, match="new parameter"):
        inner.step()


def test_an_optimizer_in_a_chain_saves_and_loads_its_own_state():
    run_ranks(1, around_dictionaries, replace(IN_FEW_BITS[2], parallel={}))
