"""Saved by torch's distributed checkpoint, loaded at other numbers of ranks and strategies."""

import copy
import functools
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as dicts
from torch.distributed.tensor import DTensor, Replicate

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.fsdp2 import ParamKey
from megatron_eopt.megatron_fsdp import build_optimizer
from tests.functional.doc_commands import blocks
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.tiers import mostly_long
from tests.unit.fsdp2 import models
from tests.unit.fsdp2.models import config, cut, eager, far, make_model, stepped, train, whole
from tests.unit.fsdp2.test_layouts import VARIANTS as ALL_VARIANTS

VARIANTS = ALL_VARIANTS | {
    "int8": config(muon_momentum_dtype="int8"),
    "fp8": config("adaptive_muon", muon_momentum_dtype="fp8"),
}


NAMES = {
    # of the last two, the noise of rounding and what is drawn follow from the count of steps
    "all": ("muon", "normuon", "soap", "adamuon", "int8", "fp8", "bf16 momentum", "psgd_pro"),
    "of each kind": ("muon", "soap", "int8", "psgd_pro"),
    "Muon and SOAP": ("muon", "soap"),
    "four": ("muon", "normuon", "soap", "adamw"),
}


def whole_state(model, optimizer):
    """Return everything that a checkpoint has, as whole tensors."""
    saved = dicts.get_optimizer_state_dict(model, optimizer)
    return {
        f"{name}.{key}": whole(value) if isinstance(value, torch.Tensor) else value
        for name, entries in saved["state"].items()
        for key, value in entries.items()
    }


def begun(layout, name):
    return train(layout, VARIANTS[name], steps=3)


@eager
def save(folder, layout, names, begin=begun):
    """Save runs; return state and weights as saved, and the weights after one more step."""
    wholes = {}
    for name in names:
        model, optimizer = begin(layout, name)
        optimizer.param_groups[0]["lr"] = 0.03
        state = {"optimizer": dicts.get_optimizer_state_dict(model, optimizer)}
        checkpoint.save(state, checkpoint_id=f"{folder}/{name}")
        wholes[name] = whole_state(model, optimizer), models.weights(model)
        wholes[name] += (stepped(model, optimizer, 3),)
    return wholes


@eager
def load(folder, layout, saved, variants=VARIANTS):
    """Return the state as loaded, and the weights after one more step."""
    results = {}
    for name, (_, trained, _) in saved.items():
        # what has stepped already must forget that
        model, optimizer = train(layout, variants[name], steps=1)
        with torch.no_grad():
            for key, param in models.named(model).items():
                param.copy_(models.shard(trained[key], param))
        loaded = {"optimizer": dicts.get_optimizer_state_dict(model, optimizer)}
        checkpoint.load(loaded, checkpoint_id=f"{folder}/{name}", no_dist=layout == "plain")
        dicts.set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
        assert optimizer.param_groups[0]["lr"] == 0.03
        results[name] = whole_state(model, optimizer), stepped(model, optimizer, 3)
    return results


SAVED = {
    "torch": ("fsdp", 4),
    "megatron": ("optim_grads_params", 2),
    "megatron's replicas": ("optim_grads_params x 2", 4),
    "megatron's units": ("one unit", 3),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    @functools.cache
    def once(framework: str, names: str) -> tuple[str, Any]:
        layout, world = SAVED[framework]
        folder, cpu = str(tmp_path_factory.mktemp(framework)), framework != "torch"
        return folder, run_ranks(world, save, folder, layout, NAMES[names], cpu=cpu, timeout=120)

    return once


def check_all(loaded, by_rank):
    """Compare what all ranks have loaded, and what they have saved, with what the first has."""
    for results in loaded + by_rank:
        for name, (found, *_, after) in results.items():
            expected, _, then = by_rank[0][name]
            assert found.keys() == expected.keys()
            assert len(found) >= 20
            for key, value in expected.items():
                assert torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value)), (name, key)
            assert far(after, then)[0] < 2e-6, name


USUAL = [
    ("torch", "plain", 1, "of each kind"),
    ("torch", "fsdp", 2, "of each kind"),
    ("megatron's replicas", "no_shard", 2, "Muon and SOAP"),
    ("megatron's units", "units", 2, "Muon and SOAP"),
]
OTHERS = [
    ("torch", "plain", 1, "all"),
    ("torch", "fsdp", 2, "all"),
    ("megatron", "optim", 2, "four"),
    ("megatron", "optim_grads_params x 2", 4, "four"),
    ("megatron's replicas", "no_shard", 2, "four"),
    ("megatron's units", "units", 2, "four"),
    ("megatron's units", "units x 2", 4, "four"),
]


@pytest.mark.parametrize(
    ("framework", "layout", "world", "names"), mostly_long([*USUAL, *OTHERS], *USUAL)
)
def test_state_loads_bit_equal_at_other_layouts(saved, framework, layout, world, names):
    folder, by_rank = saved(framework, names)
    if layout == "plain":
        loaded = [load(folder, "plain", by_rank[0])]
    else:
        cpu = framework != "torch"
        loaded = run_ranks(world, load, folder, layout, by_rank[0], cpu=cpu, timeout=120)
    check_all(loaded, by_rank)
    keys = by_rank[0]["soap"][0].keys()
    prefix = "module." if models.is_managed(SAVED[framework][0]) else ""
    state = ("up.weight.gate/L", "up.weight.up/Q_R", "down.weight.exp_avg_sq")
    assert {prefix + key for key in state} <= keys


FORMS = {
    "flattened": dicts.StateDictOptions(flatten_optimizer_state_dict=True),
    "whole": dicts.StateDictOptions(full_state_dict=True),
}


@pytest.mark.parametrize(
    ("name", "form"), [("muon", "flattened"), ("soap", "flattened"), ("soap", "whole")]
)
@on_ranks(2, cpu=False)
@eager
def test_a_run_goes_on_from_every_form_of_state(name, form):
    model, optimizer = train("fsdp", config(name), steps=3)
    other, following = train("fsdp", config(name), steps=3)
    saved = copy.deepcopy(dicts.get_optimizer_state_dict(model, optimizer, options=FORMS[form]))
    dicts.set_optimizer_state_dict(other, following, saved, options=FORMS[form])
    assert far(stepped(model, optimizer, 3, 4), stepped(other, following, 3, 4))[0] == 0


@on_ranks(2, cpu=False)
def test_state_that_is_placed_otherwise_is_cut_anew():
    (model, optimizer), (other, following) = (train("fsdp", config("adam"), n) for n in (3, 1))
    saved = optimizer.state_dict()
    for values in saved["state"].values():
        tensors = {key: value for key, value in values.items() if isinstance(value, DTensor)}
        values |= {
            key: value.redistribute(placements=[Replicate()]) for key, value in tensors.items()
        }
    following.load_state_dict(saved)
    assert far(whole_state(model, optimizer), whole_state(other, following))[0] == 0


def test_a_state_dict_with_gaps_is_refused():
    _, optimizer = train("plain", config(), steps=1)
    saved = optimizer.state_dict()
    saved["state"] = {k: v for k, v in saved["state"].items() if "momentum_buffer" not in v}
    other = build_optimizer(make_model(), config())
    with pytest.raises(ConfigurationError, match=r"up.weight: no state .momentum.*must have"):
        other.load_state_dict(saved)


NO_STACKS = tuple(name for name in models.MATRICES if name != "experts.weight")


@pytest.mark.parametrize("order", [1, -1], ids=["more groups", "fewer groups"])
@on_ranks(2)
def test_the_state_alone_loads_into_a_run_with_other_overrides(order, tmp_path):
    """By the page's snippet."""
    page = (Path(__file__).parents[3] / "docs/how_to/fsdp.md").read_text()
    (snippet,) = (text for _, text in blocks(page, "python") if '"state": state["state"]' in text)
    before, after = [None, {ParamKey(name="up.*"): {"lr_mult": 0.5}}][::order]
    model = make_model("fsdp")
    optimizer = build_optimizer(model, config(), before)
    stepped(model, optimizer, 0)
    saved = {"optimizer": dicts.get_optimizer_state_dict(model, optimizer)}
    checkpoint.save(saved, checkpoint_id=tmp_path)
    other = build_optimizer(model, config(), after)
    names = {"model": model, "optimizer": other, "folder": str(tmp_path), "dcp": checkpoint}
    names["get_optimizer_state_dict"] = dicts.get_optimizer_state_dict
    names["set_optimizer_state_dict"] = dicts.set_optimizer_state_dict
    exec(snippet, names)
    assert far(whole_state(model, other), whole_state(model, optimizer))[0] == 0
    rates = {name: group["lr"] for name, group in models.groups_of(other).items()}
    assert rates["up.weight"] == rates["up.bias"] == (0.01 if after else 0.02), rates
    assert rates["down.weight"] == 0.02


@eager
def torch_muon(names: tuple[str, ...] = NO_STACKS) -> tuple[Any, Any]:
    """Return a model and its torch.optim.Muon over these weights after three steps."""
    model = make_model()
    params = dict(model.named_parameters())
    muon = torch.optim.Muon([(name, params[name]) for name in names], lr=0.02)
    stepped(model, muon, 0, 1, 2)
    return model, muon


def continued(layout: str, saved: Any) -> dict[str, Any]:
    model = models.Model()
    model.experts.weight.requires_grad_(False)
    model = cut(model, layout, "up")
    optimizer = build_optimizer(model, config())
    optimizer.load_state_dict(saved)
    state = whole_state(model, optimizer)
    return {name.removeprefix("module."): value for name, value in state.items()}


def test_a_run_of_torchs_muon_goes_on():
    """Its settings differ, but not what its state means; it may name its parameters."""
    model, muon = torch_muon()
    saved = muon.state_dict()
    momenta = {name: saved["state"][i]["momentum_buffer"] for i, name in enumerate(NO_STACKS)}
    by_name = dicts.get_optimizer_state_dict(model, muon)
    found = run_ranks(4, continued, "fsdp", saved, cpu=False)
    for layout in ("units", "optim_grads_params"):
        found += run_ranks(2, continued, layout, saved)
    for results in [*found, continued("plain", by_name)]:
        for name in NO_STACKS:
            assert torch.equal(results[f"{name}.momentum_buffer"], momenta[name])


def test_a_matrix_that_it_has_not_stepped_starts_fresh(caplog):
    _, muon = torch_muon(NO_STACKS[1:])
    optimizer = build_optimizer(make_model(), config())
    with caplog.at_level(logging.WARNING):
        optimizer.load_state_dict(muon.state_dict())
    told = f"{NO_STACKS[0]}.*: starts fresh for muon: the checkpoint has none"
    assert re.search(told, caplog.text)
