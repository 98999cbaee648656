"""A group is what it holds and overrides: settings go with the parameters that had them.

Overrides are added, removed, moved and swapped between two runs, in the middle of a schedule, which
has multiplied all rates by :data:`PROGRESS`.
"""

import copy
import itertools
from typing import Any

import pytest
from megatron.core.optimizer import ParamKey
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.fsdp2 import build_optimizer

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
@pytest.mark.parametrize(("before", "after"), itertools.product(OVERRIDES, repeat=2))
def test_settings_go_with_what_overrides_say_now(before, after, form):
    model, optimizer = built(OVERRIDES[before])
    for group in optimizer.param_groups:
        group["lr"] *= PROGRESS
    its_model, its = built(OVERRIDES[after])
    if form == "state_dict":
        its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        set_optimizer_state_dict(its_model, its, saved)
    found = rates_of(its)
    for name, values in expected(OVERRIDES[after]).items():
        assert found[name] == pytest.approx(values, rel=1e-12), name
