"""State that is taken away, refused, copied or flattened."""

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.fsdp2 import build_optimizer
from tests.harness import run_ranks
from tests.unit.fsdp2.model import config, eager, far, make_model, set_gradients, train, weights

OPTIMIZERS = ("muon", "adaptive_muon", "soap")


def step(model, optimizer, number):
    set_gradients(model, number)
    optimizer.step()


@eager
def refused(name, kind):
    """Return the error, and the weights after a step, of a load that one rank refuses."""
    model, optimizer = train("fsdp", config(name), steps=2)
    untouched, other = train("fsdp", config(name), steps=2)
    # torch hands out the state itself
    state_dict = copy.deepcopy(optimizer.state_dict())
    for group in state_dict["param_groups"]:
        group["lr"] = 123.0
    if torch.distributed.get_rank() == 1:
        holder = next(values for values in state_dict["state"].values() if kind in values)
        del holder[kind]
    with pytest.raises(ConfigurationError) as error:
        optimizer.load_state_dict(state_dict)
    step(model, optimizer, 2)
    step(untouched, other, 2)
    return str(error.value), far(weights(model), weights(untouched))[0]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("muon", "momentum_buffer"), ("adaptive_muon", "moment2_buffer"), ("soap", "L")],
)
def test_what_one_rank_refuses_to_load_changes_nothing_on_any(name, kind):
    (first, distance), (second, _) = run_ranks(2, refused, name, kind)
    assert first == second
    assert f"lacks {kind}" in first
    assert distance == 0


def test_a_state_dict_of_whole_tensors_is_refused():
    assert "no DTensor for momentum_buffer" in run_ranks(2, whole_tensors)[0]


def whole_tensors():
    _, optimizer = train("fsdp", config(), steps=1)
    state_dict = copy.deepcopy(optimizer.state_dict())
    for values in state_dict["state"].values():
        values.update({key: value.full_tensor() for key, value in values.items() if value.dim()})
    with pytest.raises(ConfigurationError) as error:
        optimizer.load_state_dict(state_dict)
    return str(error.value)


def test_other_groups_are_refused():
    _, optimizer = train("plain", config(), steps=1)
    state_dict = optimizer.state_dict()
    state_dict["param_groups"][0]["params"].pop()
    with pytest.raises(ConfigurationError, match="has groups of"):
        optimizer.load_state_dict(state_dict)


def copied(model, name):
    """Return another model with the same weights, and its new optimizer."""
    other = make_model("fsdp")
    with torch.no_grad():
        for new, old in zip(other.parameters(), model.parameters(), strict=True):
            new.copy_(old)
    return other, build_optimizer(other, config(name))


def apart(first, second):
    """Return how far two models are from each other after two more steps."""
    for number in (3, 4):
        for model, optimizer in (first, second):
            step(model, optimizer, number)
    return far(weights(first[0]), weights(second[0]))[0]


@eager
def flattened(name):
    """Return how far a run that went on from flattened state is from one in one go."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = train("fsdp", config(name), steps=3)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    resumed, following = copied(model, name)
    set_optimizer_state_dict(resumed, following, saved, options=options)
    return apart((model, optimizer), (resumed, following))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_flattened_state_is_loaded(name):
    assert run_ranks(2, flattened, name) == [0, 0]


@eager
def frozen_later(name):
    """Return how far a run that loaded while a weight was frozen is from one that did not."""
    (model, optimizer), other = (train("fsdp", config(name), steps=3) for _ in range(2))
    model.up.weight.requires_grad_(False)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    set_optimizer_state_dict(model, optimizer, saved)
    model.up.weight.requires_grad_(True)
    return apart((model, optimizer), other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_frozen_later_keeps_its_state(name):
    assert run_ranks(2, frozen_later, name) == [0, 0]


@eager
def cleared(name):
    """Return how far an optimizer whose state was cleared is from a new one."""
    model, optimizer = train("fsdp", config(name), steps=2)
    new = copied(model, name)
    optimizer.state.clear()
    return apart((model, optimizer), new)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_cleared_state_begins_anew(name):
    assert run_ranks(2, cleared, name) == [0, 0]


def moved(moves):
    """Return the weights after two steps, having changed places in between."""
    model, optimizer = train("plain", config(), steps=1)
    if moves:
        optimizer.param_groups[0]["params"].reverse()
    set_gradients(model, 1)
    optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def test_parameters_may_change_places():
    assert all(map(torch.equal, moved(False), moved(True)))
