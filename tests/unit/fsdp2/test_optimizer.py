"""An ordinary torch optimizer: groups, state, schedules and hooks are alive."""

import copy

import pytest
import torch
from megatron.core.optimizer.optimizer_config import ParamKey
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim.lr_scheduler import LambdaLR

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.megatron_fsdp import build_optimizer
from megatron_eopt.optimizers.sharded_optimizer import ShardedOptimizer
from megatron_eopt.storage.local_tensors import local_of
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.unit.fsdp2 import models
from tests.unit.fsdp2.models import config, far, make_model, set_gradients, state, train, weights


def settings_of(optimizer):
    """Return the optimizer, rate and weight decay of every parameter, by name."""
    groups = models.groups_of(optimizer).items()
    return {name: (g["optimizer"], g["lr"], g["weight_decay"]) for name, g in groups}


def test_parameters_are_routed_by_what_they_are():
    model = make_model()
    # its 3-D weight is no stack of matrices
    model.convolution = torch.nn.Conv1d(4, 4, 3, bias=False)
    optimizer = build_optimizer(model, config(muon_lr=0.5))
    assert isinstance(optimizer, torch.optim.Optimizer)
    found = settings_of(optimizer)
    muon, table, vector = ("muon", 0.5, 0.1), ("adam", 0.02, 0.1), ("adam", 0.02, 0.0)
    assert found == {
        **dict.fromkeys(models.MATRICES, muon),
        "embedding.weight": table,
        "lm_head.weight": table,
        "convolution.weight": table,
        "up.bias": vector,
        "norm.weight": vector,
        "norm.bias": vector,
    }


def test_stacks_and_biases_of_experts_are_known_by_their_names():
    model = make_model()
    model.mixture = torch.nn.ParameterDict(
        {"experts": torch.ones(2, 4, 4), "in_bias": torch.ones(2, 4), "out_bias": torch.ones(2, 4)}
    )
    model.mixture["out_bias"].use_muon = True
    found = settings_of(build_optimizer(model, config()))
    of_mixture = {name: found[f"mixture.{name}"][0] for name in model.mixture}
    assert of_mixture == {"experts": "muon", "in_bias": "adam", "out_bias": "muon"}


def test_multipliers_of_some_parameters_are_of_their_own_rates():
    model = make_model()
    overrides = {
        ParamKey(name="up.*"): {"lr_mult": 0.5, "wd_mult": 3.0},
        ParamKey(name="down.weight"): {"max_lr": 0.25, "lr_mult": 2.0},
    }
    found = settings_of(build_optimizer(model, config(muon_lr=0.125), overrides))
    assert found["up.weight"] == ("muon", 0.0625, 3.0 * 0.1)
    assert found["up.bias"] == ("adam", 0.01, 3.0 * 0.1)
    assert found["down.weight"] == ("muon", 0.5, 0.1)
    assert found["wide.weight"] == ("muon", 0.125, 0.1)


@pytest.mark.parametrize(
    ("override", "decay"),
    [
        ({}, 0.0),
        ({"lr_mult": 0.5}, 0.0),
        ({"lr": 0.5}, 0.0),
        ({"eps": 1e-6}, 0.0),
        ({"wd_mult": 1.0}, 0.1),
        ({"weight_decay": 0.3}, 0.3),
        ({"start_wd": 0.3, "end_wd": 0.3}, 0.3),
    ],
)
def test_only_overrides_of_weight_decay_give_it_to_vectors(override, decay):
    model = make_model()
    model.gate = torch.nn.Linear(4, 1)
    vectors = ("norm.weight", "norm.bias", "gate.weight", "gate.bias")
    overrides = {ParamKey(name=vectors): override}
    found = settings_of(build_optimizer(model, config(decoupled_lr=0.5), overrides))
    assert [found[name][2] for name in vectors] == pytest.approx([decay] * 4)
    assert found["up.bias"][2] == 0
    assert found["embedding.weight"] == ("adam", 0.5, 0.1)
    everything = {ParamKey(name="*"): {"wd_mult": 1.0, "lr": 0.25}}
    found = settings_of(build_optimizer(model, config(decoupled_lr=0.5), everything))
    assert {settings[1:] for settings in found.values()} == {(0.25, 0.1)}


def test_compiled_modules_have_the_names_of_others():
    model = make_model()
    model.output, model.lm_head = model.lm_head, None
    model.up = torch.compile(model.up)
    overrides = {ParamKey(name="up.weight"): {"lr_mult": 0.5}}
    found = settings_of(build_optimizer(torch.compile(model), config(), overrides))
    assert found["output.weight"][0] == "adam"
    assert found["up.weight"][:2] == ("muon", 0.01)


def test_the_next_step_sees_what_a_schedule_writes():
    model = make_model()
    optimizer = build_optimizer(model, config())
    before = weights(model)
    schedule = LambdaLR(optimizer, lambda step: float(step > 0))
    set_gradients(model, 0)
    optimizer.step()
    assert far(weights(model), before)[0] == 0
    schedule.step()
    optimizer.step()
    assert far(weights(model), before)[0] > 1e-3


def test_hooks_and_closures_are_called():
    model = make_model()
    optimizer = build_optimizer(model, config())
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer.register_step_post_hook(lambda *_: called.append("post"))

    def closure():
        assert torch.is_grad_enabled()
        set_gradients(model, 0)
        return 1.5

    # torch puts hooks around the ``step`` of the class of each optimizer that is made
    ShardedOptimizer([], [], {})
    assert optimizer.step(closure) == 1.5
    assert called == ["pre", "post"]


@pytest.mark.parametrize("name", ["normuon", "muon"])
def test_parameters_without_gradients_rest(name):
    model, optimizer = train("plain", config(name), steps=1)
    before, kept = weights(model), state(model, optimizer)
    set_gradients(model, 1)
    model.down.weight.grad = model.norm.weight.grad = None
    optimizer.step()
    after, now = weights(model), state(model, optimizer)
    for key, weight in before.items():
        rests = key in ("down.weight", "norm.weight")
        assert torch.equal(weight, after[key]) == rests, key
    for key, value in kept.items():
        if key.startswith(("down", "norm.weight")):
            assert torch.equal(value, now[key]), key


def test_soap_refuses_to_leave_a_matrix_out():
    model, optimizer = train("plain", config("soap"), steps=1)
    model.down.weight.grad = None
    with pytest.raises(ConfigurationError, match=r"down.weight.*have no gradient"):
        optimizer.step()


@on_ranks(2)
def test_gradients_may_have_other_placements_than_weights():
    found = []
    # those of weights, replicated, and unreduced
    for placement in (None, Replicate(), Partial()):
        model = make_model("fsdp")
        optimizer = build_optimizer(model, config())
        set_gradients(model, 0)
        for param in model.parameters() if placement is not None else ():
            param.grad = param.grad.redistribute(placements=[placement])
        optimizer.step()
        found.append(weights(model))
    usual, *others = found
    for other in others:
        assert all(torch.equal(other[name], weight) for name, weight in usual.items())


@models.eager
def low_precision(layout):
    """Return the weights after a step of Muon, having loaded its state and others' own."""
    for name in ("psgd_pro", "adam", "muon"):
        model, optimizer = train(layout, config(name), steps=1, dtype=torch.bfloat16)
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(copy.deepcopy(saved))
        for number, values in optimizer.state_dict()["state"].items():
            for kind, value in values.items():
                before, now = (local_of(v) for v in (saved["state"][number][kind], value))
                assert torch.equal(torch.as_tensor(now), torch.as_tensor(before)), (number, kind)
                assert getattr(now, "dtype", None) == getattr(before, "dtype", None), kind
    momentum = optimizer.state[model.up.weight]["momentum_buffer"]
    assert momentum.dtype == torch.float32
    if layout != "plain":
        assert isinstance(momentum, DTensor)
        assert momentum.placements == model.up.weight.placements
    return weights(model)


def test_16_bit_weights_are_rounded_once_and_state_is_as_it_was():
    model = models.Model().to(torch.bfloat16).float()
    model.up.weight.eopt_split = make_model().up.weight.eopt_split
    optimizer = build_optimizer(model, config())
    set_gradients(model, 0)
    for param in model.parameters():
        param.grad = param.grad.bfloat16().float()
    optimizer.step()
    expected = {name: weight.bfloat16() for name, weight in weights(model).items()}
    ours = low_precision("plain")
    for result in [ours, *run_ranks(2, low_precision, "fsdp", cpu=False)]:
        for name, weight in expected.items():
            # a last bit where the two sides of a rounding boundary are 1e-7 apart
            same = (result[name] == weight).float().mean()
            assert same > 0.99, name
