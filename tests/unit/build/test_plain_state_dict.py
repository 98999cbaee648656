"""The state of the plain storage as a plain file, as ``--ckpt-format torch`` keeps it."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.settings.registry import optimizer_names
from tests.harness import run_ranks
from tests.unit.build.plain_runs import STEPS, Run, build, local, step, unwrapped
from tests.unit.build.test_plain_checkpoint import ADAPTIVE, SMALL


def _continue(runs: list[Run], folder: str) -> list[list[tuple[Any, Any]]]:
    """Return losses and tensors of uninterrupted runs and of resumed ones."""
    results = []
    for number, run in enumerate(runs):
        chunk, optimizer = build(run)
        for count in range(STEPS):
            step(chunk, optimizer, count)
        file = f"{folder}/{number}"
        state = {"model": unwrapped(chunk).state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, file)
        found = [_go_on(chunk, optimizer)]

        chunk, optimizer = build(run, seed=2)
        state = torch.load(file, weights_only=True)
        unwrapped(chunk).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        results.append([*found, _go_on(chunk, optimizer)])
    return results


def _go_on(chunk: Any, optimizer: Any) -> tuple[Any, Any]:
    losses = [step(chunk, optimizer, number) for number in range(STEPS, 2 * STEPS)]
    return losses, {name: tensor.clone() for name, (_, tensor) in local(chunk, optimizer).items()}


RUNS = {
    "float32": [Run(name, {"sgd_momentum": 0.9}, model=SMALL) for name in optimizer_names()],
    "bfloat16": [
        replace(run, dtype="bfloat16", model=SMALL)
        for run in [Run("muon"), *ADAPTIVE, Run("soap"), Run("adam"), Run("muon", mixed=True)]
    ],
}


@pytest.mark.parametrize("dtype", RUNS)
def test_a_state_dict_continues(tmp_path, dtype):
    (results,) = run_ranks(1, _continue, RUNS[dtype], str(tmp_path), timeout=200)
    for run, ((losses, tensors), (again, resumed)) in zip(RUNS[dtype], results, strict=True):
        assert again == losses, run
        assert tensors.keys() == resumed.keys()
        for name, tensor in tensors.items():
            assert torch.equal(resumed[name], tensor), (run, name)


def _refusals() -> dict[str, str]:
    muon, adam = Run("muon", model=SMALL), Run("adam", model=SMALL)
    states = {
        name: build(run)[1].state_dict() for name, run in {"muon": muon, "adam": adam}.items()
    }
    routed = replace(adam, overrides={"*linear_fc1*": "lion"})
    # three groups of Adam, where two are wanted
    regrouped = build(replace(adam, config={"decoupled_lr": 0.1}))[1].state_dict()
    cases = {
        "another main": (muon, states["adam"]),
        "fewer": (adam, states["muon"]),
        "other routing": (routed, states["muon"]),
        "other groups": (adam, regrouped),
    }
    messages = {}
    for name, (run, state) in cases.items():
        with pytest.raises(ConfigurationError) as caught:
            build(run)[1].load_state_dict(state)
        messages[name] = str(caught.value)
    return messages


def test_another_optimizers_state_is_refused():
    (messages,) = run_ranks(1, _refusals)
    assert "[['adam']]" in messages["another main"]
    assert "[['muon'], ['adam']]" in messages["another main"]
    assert "of the optimizers [['adam']]" in messages["fewer"]
    assert "of the optimizers [['adam'], ['lion']]" in messages["other routing"]
    assert "has ['adam/dense/" in messages["other groups"]


def _exchanged() -> str:
    """Two parameters of equal size, and other shapes, in exchanged places."""
    run = Run("adam", model=SMALL)
    chunk, optimizer = build(run)
    step(chunk, optimizer, 0)
    state = optimizer.state_dict()
    values = state["state"]
    number = next(n for n, kept in values.items() if len(set(kept["exp_avg"].shape)) == 2)
    values[number] = {**values[number], "exp_avg": values[number]["exp_avg"].mT}
    resumed = build(run)[1]
    with pytest.raises(ConfigurationError) as caught:
        resumed.load_state_dict(state)
    assert not any(
        values["exp_avg"].any()
        for child in resumed.chained_optimizers
        for values in child.optimizer.state.values()
    )
    return str(caught.value)


def test_state_of_another_shape_and_as_many_elements_is_refused():
    (message,) = run_ranks(1, _exchanged)
    assert "exp_avg of shape" in message


def _by_file(name: str, path: str, older: bool) -> None:
    """Compare a run with one that goes on from a file of this rank's."""
    run = Run(name, model=SMALL)
    chunk, optimizer = build(run)
    for count in range(STEPS):
        step(chunk, optimizer, count)
    optimizer.save_state_dict_to_file(path)
    model = copy.deepcopy(unwrapped(chunk).state_dict())
    if older:
        # files had the state of matrices beside what is cut like weights, too
        content = torch.load(path, weights_only=True)
        for item in content["optimizers"]:
            for matrix, entry in item["matrices"].items():
                state = item["fragments"][matrix.rpartition("[")[0]]["state"]
                for (kind, *_), value in entry["state"].items():
                    state.setdefault(kind, [value])
        torch.save(content, path)
    losses, tensors = _go_on(chunk, optimizer)
    chunk, optimizer = build(run, seed=2)
    unwrapped(chunk).load_state_dict(model)
    optimizer.load_state_dict_from_file(path)
    again, resumed = _go_on(chunk, optimizer)
    assert again == losses
    assert all(torch.equal(resumed[key], tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize(
    ("name", "older"),
    [("psgd_pro", False), ("psgd_pro", True), ("muon_hyperball", False), ("soap", True)],
)
def test_a_file_of_a_rank_continues(tmp_path, name, older):
    run_ranks(1, _by_file, name, str(tmp_path / "state.pt"), older)


def _fresh(further: int) -> None:
    """Load a state without second moments, into an optimizer that has done further steps."""
    run = Run("adam", {"checkpoint_fresh_state": ("exp_avg_sq",)}, model=SMALL)
    chunk, optimizer = build(run)
    step(chunk, optimizer, 0)
    state = copy.deepcopy(optimizer.state_dict())
    for values in state["state"].values():
        del values["exp_avg_sq"]
    if not further:
        chunk, optimizer = build(run)
    for count in range(further):
        step(chunk, optimizer, 1 + count)
    optimizer.load_state_dict(state)
    # one moment means nothing without the other, or with another count of steps
    for values in optimizer.state_dict()["state"].values():
        assert not values["exp_avg"].any()
        assert not values["exp_avg_sq"].any()
        assert int(values["step"]) == 0


@pytest.mark.parametrize("further", [0, 1])
def test_what_starts_fresh_is_reset(further):
    run_ranks(1, _fresh, further)


def _swapped() -> None:
    run = Run("adam", dtype="bfloat16", model=SMALL)
    chunk, optimizer = build(run)
    step(chunk, optimizer, 0)
    state = optimizer.state_dict()
    state["optimizer"]["param_groups"].reverse()
    state["fp32_from_fp16_params"].reverse()
    other, resumed = build(run, seed=2)
    resumed.load_state_dict(state)
    before, after = local(chunk, optimizer), local(other, resumed)
    for name, (_, tensor) in before.items():
        if " " in name:
            assert torch.equal(after[name][1], tensor), name


def test_the_order_of_groups_does_not_matter():
    run_ranks(1, _swapped)
