"""A group is what it holds and overrides: settings go with the parameters that had them.

Overrides are added, removed, moved and swapped between two runs, in the middle of a schedule, which
has multiplied all rates by :data:`PROGRESS`.
"""

import copy
import functools
import itertools
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.optimizer import ParamKey
from torch import nn
from torch.distributed.checkpoint import state_dict as dicts

from megatron_eopt import EmergingOptimizerConfig, get_megatron_optimizer
from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.checkpoint.trainer import _rates_kept
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.state.groups import take_settings
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.unit.storage.full_state import Case, resume_as, steps, write_as
from tests.unit.storage.runs import PLAIN, make_chunk

PROGRESS = 0.01
LR, SLOW, FAST = 1e-3, 1e-4, 5e-4
DECAY = 0.1

type Overrides = dict[str, dict[str, float]]  # by name of the layer

OVERRIDES: dict[str, Overrides] = {
    "none": {},
    "slow 0": {"0": {"lr": SLOW}},
    "fast 1": {"1": {"lr": FAST}},
    "fast 0": {"0": {"lr": FAST}},
    "both": {"0": {"lr": SLOW}, "1": {"lr": FAST}},
    "swapped": {"0": {"lr": FAST}, "1": {"lr": SLOW}},
    "slow 0 without decay": {"0": {"lr": SLOW, "weight_decay": 0.0}},
    "0 without decay": {"0": {"weight_decay": 0.0}},
    "half 2": {"2": {"lr_mult": 0.5}},
    "other betas of 1": {"1": {"eps": 1e-6}},
}


def built(overrides: Overrides) -> tuple[nn.Module, Any]:
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "012"})
    config = EmergingOptimizerConfig(optimizer="adam", lr=LR, weight_decay=DECAY)
    keys = {ParamKey(name=f"{name}.weight"): its for name, its in overrides.items()}
    return model, build_optimizer(model, config, keys)


def rates_of(optimizer: Any) -> dict[str, tuple[float, float, float]]:
    return {
        optimizer.names[param].partition(".")[0]: (group["lr"], group["weight_decay"], group["eps"])
        for group in optimizer.param_groups
        for param in group["params"]
    }


def expected(overrides: Overrides) -> dict[str, tuple[float, float, float]]:
    """Return what this run says, as far as the schedule has come."""
    found = {}
    for name in "012":
        its = overrides.get(name, {})
        rate = its.get("lr", LR * its.get("lr_mult", 1.0))
        found[name] = PROGRESS * rate, its.get("weight_decay", DECAY), its.get("eps", 1e-8)
    return found


@pytest.mark.parametrize("form", ["state_dict", "torch's"])
def test_settings_go_with_what_overrides_say_now(form):
    for before, after in itertools.product(OVERRIDES, repeat=2):
        model, optimizer = built(OVERRIDES[before])
        for group in optimizer.param_groups:
            group["lr"] *= PROGRESS
        its_model, its = built(OVERRIDES[after])
        if form == "state_dict":
            its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        else:
            saved = copy.deepcopy(dicts.get_optimizer_state_dict(model, optimizer))
            dicts.set_optimizer_state_dict(its_model, its, saved)
        found = rates_of(its)
        for name, values in expected(OVERRIDES[after]).items():
            assert found[name] == pytest.approx(values, rel=1e-12), (before, after, name)


def test_without_the_rate_that_a_schedule_began_with_the_present_rate_stays():
    group = {"group_id": "adam/0/max_lr", "lr": 0.1, "max_lr": 0.1}
    take_settings(group, {"lr": 0.01, "max_lr": 0.0, "eps": 0.25})
    assert (group["lr"], group["eps"]) == (0.1, 0.25)
    take_settings(group, {"lr": 0.01, "eps": 0.5})
    assert (group["lr"], group["eps"]) == (0.1, 0.5)


MODEL = {"layers": 3, "hidden": 16, "heads": 2, "vocabulary": 32}
FORMS = {
    "sharded": ("torch_dist", {}),
    "replicated": ("torch_dist", PLAIN),
    "replicated state_dict": ("state_dict", PLAIN),
}


def chain_of(case: Case, prepare: None = None, *, overrides: Overrides) -> tuple[Any, Any]:
    """Return a model of three layers, whose overrides are for layers, and its optimizer."""
    chunk = make_chunk(case.run)
    config = EmergingOptimizerConfig(
        optimizer="adam",
        lr=LR,
        weight_decay=DECAY,
        clip_grad=0.0,
        **{"use_distributed_optimizer": True} | case.ddp,
    )
    keys = {ParamKey(name=f"*layers.{name}.*"): its for name, its in overrides.items()}
    return chunk, get_megatron_optimizer(config, [chunk], keys)


def by_layer(chunk: Any, optimizer: Any, *settings: str) -> dict[str, tuple[float, ...]]:
    """Return settings of each layer's group."""
    names = {param: name for name, param in chunk.named_parameters()}
    found = defaultdict(set)
    for storage in optimizer.chained_optimizers:
        groups = storage.optimizer.param_groups
        group_of = {id(param): group for group in groups for param in group["params"]}
        for item in storage.shards:
            group = group_of[id(item.main)]
            layer = names[item.param].partition("layers.")[2].partition(".")[0]
            found[layer].add(tuple(group[key] for key in settings))
    return {layer: its.pop() for layer, its in found.items() if len(its) == 1}


def changed(name: str, pairs: list[tuple[str, str]], folder: Path) -> list[Any]:
    """Save with the overrides of before, resume with those of after; return the rates.

    They are those after a load, and those that the trainer then takes from the checkpoint if its
    flag asks for this.
    """
    form, storage = FORMS[name]
    case = Case("adam", MODEL, ddp=storage)
    scheduler = SimpleNamespace(use_checkpoint_opt_param_scheduler=True, step=lambda count: None)
    found = []
    for before, its in itertools.groupby(pairs, key=lambda pair: pair[0]):
        chunk, optimizer = chain_of(case, overrides=OVERRIDES[before])
        steps(case, chunk, optimizer, 0, 1)
        for group in optimizer.param_groups:
            group["lr"] *= PROGRESS
        place = folder / before
        place.mkdir()
        weights = write_as(form, case, chunk, optimizer, place)
        forget_megatron()
        for _, after in its:
            make = functools.partial(chain_of, overrides=OVERRIDES[after])
            chunk, optimizer = resume_as(form, case, place, weights, make)
            rates = by_layer(chunk, optimizer, "lr", "weight_decay", "eps")
            try:
                with _rates_kept(optimizer, scheduler):
                    pass
                found.append((rates, by_layer(chunk, optimizer, "max_lr")))
            except CheckpointError as error:
                found.append((rates, str(error)))
            forget_megatron()
    return found


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    "pairs",
    [
        [("slow 0", "fast 1"), ("none", "slow 0")],
        pytest.param([*itertools.product(OVERRIDES, repeat=2)], marks=pytest.mark.long),
    ],
    ids=["some", "all"],
)
def test_settings_go_with_what_overrides_say_now_in_chains(tmp_path, name, pairs):
    (found,) = run_ranks(1, changed, name, pairs, tmp_path, timeout=500)
    for (before, after), (rates, of_checkpoint) in zip(pairs, found, strict=True):
        for layer, values in expected(OVERRIDES[after]).items():
            assert rates[layer] == pytest.approx(values, rel=1e-12), (before, after, layer)
        old, new = (
            {layer: rate / PROGRESS for layer, (rate, *_) in expected(OVERRIDES[its]).items()}
            for its in (before, after)
        )
        had, has = (
            {layer for layer, its in overrides.items() if its.keys() & {"lr", "lr_mult"}}
            for overrides in (OVERRIDES[before], OVERRIDES[after])
        )
        if isinstance(of_checkpoint, str):
            assert "has learning rates for parameter groups" in of_checkpoint
            # such a layer may have no group of its own
            assert had - has, (before, after)
            continue
        for layer in old:
            rate = (new if layer in has - had else old)[layer]
            assert of_checkpoint[layer] == pytest.approx((rate,), rel=1e-12), (before, after, layer)
