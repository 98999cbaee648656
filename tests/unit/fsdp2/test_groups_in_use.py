"""What users do with groups and hooks of an optimizer, as of any in torch."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.config.registry import EmergingOptimizerEntry, optimizer_names, registered
from megatron_eopt.fsdp2 import build_optimizer
from tests.harness.tiers import mostly_long
from tests.unit.fsdp2.models import config, make_model, set_gradients, stepped

OPTIMIZERS = [n for n in optimizer_names() if n != "sinkhorn_muon" and "oblique" not in n]


def built(name="muon"):
    fields = {"weight_decay": 0.0} if name == "muon_hyperball" else {}
    model = make_model()
    return model, build_optimizer(model, config(name, **fields))


def place_of(optimizer, name):
    return next(
        (group["params"], place)
        for group in optimizer.param_groups
        for place, param in enumerate(group["params"])
        if optimizer.names.get(param) == name
    )


@pytest.mark.parametrize("name", ["muon", "normuon", "soap", "adam"])
@pytest.mark.parametrize("changed", ["embedding.weight", "down.weight"])
def test_a_parameter_that_was_replaced_is_named(name, changed):
    model, optimizer = built(name)
    set_gradients(model, 0)
    params, place = place_of(optimizer, changed)
    params[place] = nn.Parameter(torch.randn(13, 12))
    params[place].grad = torch.randn(13, 12)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ConfigurationError, match=rf"of shape \(13, 12\), {changed}"):
        optimizer.step()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("moved", ["down.weight", "embedding.weight"])
def test_a_parameter_in_another_optimizers_group_is_named(moved):
    model, optimizer = built()
    params, place = place_of(optimizer, moved)
    param = params.pop(place)
    optimizer_of = [group["optimizer"] for group in optimizer.param_groups]
    other = "adam" if moved == "down.weight" else "muon"
    optimizer.param_groups[optimizer_of.index(other)]["params"].append(param)
    set_gradients(model, 0)
    with pytest.raises(ConfigurationError, match=moved):
        optimizer.step()


def test_a_matrix_that_its_owner_misses_is_named():
    model, optimizer = built("soap")
    params, place = place_of(optimizer, "down.weight")
    params.pop(place)
    set_gradients(model, 0)
    with pytest.raises(ConfigurationError, match=r"down\.weight"):
        optimizer.step()


@pytest.mark.parametrize("name", mostly_long(OPTIMIZERS, "muon", "soap", "adam"))
def test_one_step_is_one_step_for_hooks_of_all_optimizers(name):
    model, optimizer = built(name)
    seen = []
    hooks = [
        register_optimizer_step_pre_hook(lambda its, *_: seen.append(type(its).__name__)),
        register_optimizer_step_post_hook(lambda its, *_: seen.append(type(its).__name__)),
    ]
    try:
        set_gradients(model, 0)
        with torch.profiler.profile() as profile:
            optimizer.step()
    finally:
        for hook in hooks:
            hook.remove()
    assert seen == ["DTensorOptimizer"] * 2
    ranges = [e.name for e in profile.events() if e.name.startswith("Optimizer.step#")]
    assert ranges == ["Optimizer.step#DTensorOptimizer.step"]


@pytest.mark.parametrize("name", ["muon", "adam"])
def test_a_scheduler_that_cycles_momentum(name):
    model, optimizer = built(name)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10)
    for number in range(3):
        stepped(model, optimizer, number)
        scheduler.step()
    group = optimizer.param_groups[0]
    key = "momentum" if name == "muon" else "betas"
    value = group[key] if name == "muon" else group[key][0]
    assert 0.85 <= value < 0.95
    assert group["lr"] != 0.02


def test_state_without_values_is_named():
    model, optimizer = built()
    stepped(model, optimizer, 0)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state.update({k: v.to("meta") for k, v in state.items() if isinstance(v, torch.Tensor)})
    _, following = built()
    with pytest.raises(ConfigurationError, match=r"weight: momentum_buffer is on the meta device"):
        following.load_state_dict(saved)


class Counting(torch.optim.SGD):
    """Counts steps in its groups, as other packages' fused Adam does."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["rounds"] = group.get("rounds", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_an_optimizer_writes_to_its_groups_stays_there(dtype):
    # it steps float32 copies of weights of 16 bits, in groups of their own
    how = {"state_layout": "element_wise", "init_state_fn": lambda *_: None}
    entry = EmergingOptimizerEntry(Counting, **how)
    with registered("counting", entry):
        model = make_model(dtype=dtype)
        optimizer = build_optimizer(model, config("counting"))
        stepped(model, optimizer, 0, 1)
    counts = {g["optimizer"]: g.get("rounds") for g in optimizer.param_groups if g["params"]}
    assert counts.pop("counting") == 2
    assert set(counts.values()) <= {None}
