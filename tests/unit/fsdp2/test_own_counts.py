"""Parameters with different counts of steps, in both FSDPs, with and without Megatron's trainer."""

import copy
import itertools
import re
from typing import Any

import pytest
import torch
from megatron.core.optimizer import ParamKey
from torch import distributed
from torch.distributed import checkpoint

from megatron_eopt import EmergingOptimizerEntry
from megatron_eopt.base.agreement import gather_objects
from megatron_eopt.config.registry import registered
from megatron_eopt.megatron_fsdp import build_optimizer
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.tiers import mostly_long
from tests.unit.fsdp2 import models
from tests.unit.fsdp2.models import config, eager, far, is_managed, named, set_gradients, train
from tests.unit.fsdp2.test_checkpoint import check_all, load, save
from tests.unit.megatron_fsdp.test_checkpoint import state_of
from tests.unit.storage import foreign

FIELDS = {"adaptive_muon_moment2_method": "namo", "adaptive_muon_bias_correction": True}
NAMES = {"NAMO": "adaptive_muon", "SOAP": "soap", "Adam": "adam"}
SETTINGS = {name: config(optimizer, **FIELDS) for name, optimizer in NAMES.items()}
EARLY, LATE = "down.weight", "norm.bias"
"""A matrix whose optimizer was the same before, and a vector whose optimizer was another."""

ONCE = "tiny.weight"
"""A matrix without a gradient in the first of two steps; SOAP cannot step without."""


def overrides(main: str, early: str, late: str) -> Any:
    """Return what makes Lion's run the one before: all matrices but one will be new to ``main``."""
    return {
        ParamKey(name=f"*{early}"): {"optimizer": main},
        ParamKey(name=f"*{late}"): {"optimizer": "lion"},
    }


def expected(counts: dict[str, int], steps: int, early: str, late: str) -> dict[str, int]:
    """Return what the counts should be after 3 steps of Lion and ``steps`` of another."""
    of_matrices = {name for name in counts if name.endswith((*NEW, early)) and early not in name}
    new = {name for name in counts if name in of_matrices or late in name}
    return {name: steps if name in new else 3 + steps for name in counts}


NEW = ("up.weight", ONCE, "wide.weight", "experts.weight", "turned.weight", "hidden.weight")


def counts_of(optimizer: Any) -> dict[str, int]:
    """Return the count of each parameter, which is the same on all ranks."""
    inner = getattr(optimizer, "chained_optimizers", None)
    inner = inner[0].optimizer if inner else optimizer
    saved = inner.state_dict()
    number_of = saved["param_names"]
    mine = {
        number_of[number].removeprefix("module."): {int(v) for k, v in state.items() if "step" in k}
        for number, state in saved["state"].items()
    }
    mine = {name.rpartition("module.")[2]: counts for name, counts in mine.items() if counts}
    assert all(other == mine for other in gather_objects(mine))
    assert all(len(counts) == 1 for counts in mine.values())
    return {name: min(counts) for name, counts in mine.items()}


def counts_in(state: dict[str, Any]) -> dict[str, int]:
    """Return the count of each parameter in saved state, where each of its matrices has one."""
    found: dict[str, set[int]] = {}
    for key, value in state.items():
        if said := re.search(r"(\w+\.(?:weight|bias))\.(?:.*/)?step$", key):
            found.setdefault(said[1], set()).add(int(value))
    assert all(len(counts) == 1 for counts in found.values())
    return {name: min(counts) for name, counts in found.items()}


def joined(layout: str, name: str) -> tuple[Any, Any]:
    """Return a run after two steps, in which most parameters had another optimizer before."""
    settings, model = SETTINGS[name], models.make_model(layout)
    others = overrides(settings.optimizer, EARLY, LATE) if name != "Adam" else None
    before = config("lion", **FIELDS) if name != "Adam" else settings
    first = build_optimizer(model, before, others)
    models.stepped(model, first, 0, 1, 2)
    optimizer = build_optimizer(model, settings)
    optimizer.load_state_dict(copy.deepcopy(first.state_dict()))
    for number in (3, 4):
        set_gradients(model, number)
        if number == 3 and name != "SOAP" and not is_managed(layout):
            named(model)[ONCE].grad = None
        optimizer.step()
    return model, optimizer


def check(name: str, layout: str, counts: dict[str, int]) -> None:
    """Check the counts of a run after its two steps."""
    wanted = dict.fromkeys(counts, 5) if name == "Adam" else expected(counts, 2, EARLY, LATE)
    if name != "SOAP" and not is_managed(layout):
        wanted[ONCE] -= 1
    assert counts == wanted
    assert len(set(counts.values())) > 1 or (name == "Adam" and is_managed(layout))


@pytest.mark.parametrize(
    ("layout", "others"),
    [
        ("fsdp", [("fsdp", 2), ("plain", 1)]),
        pytest.param("optim_grads_params", [("optim", 2)], marks=pytest.mark.long),
    ],
)
def test_own_loops_go_on_with_their_counts(tmp_path, layout, others):
    how: Any = {"cpu": is_managed(layout), "timeout": 200}
    by_rank = run_ranks(2, save, str(tmp_path), layout, [*SETTINGS], joined, **how)
    for name, (state, *_) in by_rank[0].items():
        check(name, layout, counts_in(state))
    for other, world in others:
        loaded = run_ranks(world, load, str(tmp_path), other, by_rank[0], SETTINGS, **how)
        check_all(loaded, by_rank)


@pytest.mark.parametrize(
    ("storage", "main"),
    mostly_long(
        itertools.product(("fsdp2", "megatron_fsdp"), ("adaptive_muon", "soap")), ("fsdp2", "soap")
    ),
)
@on_ranks(2)
@eager
def test_megatrons_trainer_goes_on_with_their_counts(tmp_path, storage, main):
    """It has the counts and weights of a run that is loaded in between."""
    chunk = foreign.wrapped(storage, foreign.Foreign())
    others = overrides(main, "hidden.weight", "hidden.bias")
    first = foreign.built(storage, chunk, others, optimizer="lion", **FIELDS)
    foreign.step(storage, chunk, first, 0, 3)
    optimizer = foreign.built(storage, chunk, optimizer=main, **FIELDS)
    optimizer.load_state_dict(copy.deepcopy(first.state_dict()))
    foreign.step(storage, chunk, optimizer, 3, 5)
    before, path = foreign.weights(chunk), tmp_path / f"{distributed.get_rank()}.pt"
    if storage == "megatron_fsdp":
        checkpoint.save(state_of(chunk, optimizer, is_loading=False), checkpoint_id=tmp_path)
    else:
        torch.save(optimizer.state_dict(), path)
    counts = counts_of(optimizer)
    foreign.step(storage, chunk, optimizer, 5, 6)
    whole = foreign.weights(chunk)
    forget_megatron()
    chunk = foreign.wrapped(storage, foreign.Foreign())
    optimizer = foreign.built(storage, chunk, optimizer=main, **FIELDS)
    for name, param in foreign.parameters(chunk).items():
        param.detach().copy_(models.shard(before[name], param))
    if storage == "megatron_fsdp":
        state = state_of(chunk, optimizer, is_loading=True)
        checkpoint.load(state, checkpoint_id=tmp_path)
        optimizer.load_state_dict(state["optimizer"])
    else:
        optimizer.load_state_dict(torch.load(path, weights_only=False))
    for group in optimizer.param_groups:
        group["lr"] = 0.02
    assert counts == counts_of(optimizer) == expected(counts, 2, "hidden.weight", "hidden.bias")
    assert set(counts.values()) == {2, 5}
    foreign.step(storage, chunk, optimizer, 5, 6)
    assert far(whole, foreign.weights(chunk))[0] == 0


@on_ranks(2, timeout=120)
@eager
def test_ranks_with_empty_shards_count_as_the_owner_does():
    """In the third step, some parameters have no gradient."""
    model, optimizer = train("optim_grads_params", config("adam"), steps=2)
    set_gradients(model, 2)
    for param in named(model).values():
        if param.shape == (3, 5) or param.dim() == 1:
            param.grad = None
    optimizer.step()
    assert set(counts_of(optimizer).values()) == {2, 3}


class Lazy(torch.optim.Optimizer):
    """Creates its state in its first step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["step"] = self.state[param].get("step", 0) + 1
                param -= group["lr"] * param.grad


def test_state_that_a_load_creates_has_no_count():
    model = torch.nn.Linear(4, 6, bias=False)
    others = build_optimizer(model, config("muon"))
    with registered("lazy", EmergingOptimizerEntry(Lazy, init_state_fn=lambda *_: None)):
        optimizer = build_optimizer(model, config("lazy"))
    for steps in (others.step, others.step, optimizer.step):
        model.weight.grad = torch.ones_like(model.weight)
        if steps == optimizer.step:
            optimizer.load_state_dict(copy.deepcopy(others.state_dict()))
        steps()
    (state,) = optimizer.state_dict()["state"].values()
    assert {int(value) for key, value in state.items() if "step" in key} == {1}
