"""State as a plain file: ``state_dict``, as ``--ckpt-format torch`` keeps it, and ranks' files."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.config.registry import optimizer_names
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.harness.tiers import mostly_long
from tests.unit.storage.full_state import Case, build, differences, full_state, steps
from tests.unit.storage.runs import DENSE, PLAIN, SHARDED
from tests.unit.wrappers.test_plain_checkpoint import ADAPTIVE, BF16, SMALL, plain

MODEL = {**DENSE, "hidden": 48}
IN_BF16 = [
    *(plain(name, BF16) for name in ("muon", "soap", "lion", "adam", "sgd")),
    *ADAPTIVE,
    replace(plain("muon", BF16), float32="norm"),
]


def in_few_bits(storage: dict[str, bool], *dtypes: str) -> list[Case]:
    return [
        Case("muon", MODEL, {"tp": 2}, storage, {**storage, "muon_momentum_dtype": dtype})
        for dtype in dtypes
    ]


CASES = {
    "some, fp32": (1, [plain(name) for name in ("adam", "soap", "adaptive_muon")]),
    "plain, fp32": (1, [plain(name) for name in optimizer_names()]),
    "plain, bf16": (1, IN_BF16),
    "muon in bf16": (1, IN_BF16[:1]),
    "few bits on two ranks": (2, [*in_few_bits(PLAIN, "fp8"), *in_few_bits(SHARDED, "int8")]),
    "two ranks": (
        2,
        [
            *in_few_bits(PLAIN, "bf16"),
            *in_few_bits(SHARDED, "bf16"),
            Case("soap", MODEL, {}, SHARDED, SHARDED),
        ],
    ),
}


def gone_on(cases: list[Case], folder: str) -> None:
    """Compare four steps in one go with two and two, the state going through files between."""
    for number, case in enumerate(cases):
        chunk, optimizer = build(case)
        steps(case, chunk, optimizer, 0, 2)
        weights = [param.detach().clone() for param in chunk.parameters()]
        # each rank writes a file of its own beside it
        file = f"{folder}/{number}.pt"
        optimizer.save_state_dict_to_file(file)
        states: list[Any] = [file]
        if not case.config["use_distributed_optimizer"]:
            # of fragments it is in the ranks' files alone
            whole_file = f"{file}.{torch.distributed.get_rank()}"
            torch.save(optimizer.state_dict(), whole_file)
            states.append(torch.load(whole_file, weights_only=True))
        steps(case, chunk, optimizer, 2, 4)
        whole = full_state(case, chunk, optimizer)
        for state in states:
            forget_megatron()
            chunk, optimizer = build(case)
            for param, weight in zip(chunk.parameters(), weights, strict=True):
                param.data.copy_(weight)
            from_file = isinstance(state, str)
            (optimizer.load_state_dict_from_file if from_file else optimizer.load_state_dict)(state)
            steps(case, chunk, optimizer, 2, 4)
            found = full_state(case, chunk, optimizer)
            assert not differences(whole, found), (case, type(state))
        forget_megatron()


@pytest.mark.parametrize(
    "name", mostly_long(CASES, "muon in bf16", "few bits on two ranks", "some, fp32")
)
def test_state_continues(tmp_path, name):
    ranks, cases = CASES[name]
    run_ranks(ranks, gone_on, cases, str(tmp_path), timeout=300)


def _momenta(case: Case, state: Any = None) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the momenta after two steps, or after a load, and the state dict."""
    chunk, optimizer = build(case)
    if state is None:
        steps(case, chunk, optimizer, 0, 2)
    else:
        optimizer.load_state_dict(state)
    name_of = {param: name for name, param in chunk.named_parameters()}
    found = {
        name_of[item.param]: member.optimizer.state[item.main]["momentum_buffer"].clone()
        for member in optimizer.chained_optimizers[:1]
        for item in member.shards
    }
    return found, optimizer.state_dict()


def _sums_and_means() -> tuple[float, list[tuple[torch.Tensor, torch.Tensor]]]:
    sums, state = _momenta(plain("oblique_sgd"))
    momentum = state[0]["param_groups"][0]["momentum"]
    exchange_config, _ = _momenta(plain("muon"), state)
    return momentum, [(sums[name], exchange_config[name]) for name in exchange_config]


def test_sums_of_gradients_become_means():
    ((momentum, pairs),) = run_ranks(1, _sums_and_means)
    assert momentum > 0
    assert len(pairs) > 3
    for total, mean in pairs:
        torch.testing.assert_close(mean, total * (1 - momentum))


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
