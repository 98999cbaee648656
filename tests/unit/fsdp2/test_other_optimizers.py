"""State that another optimizer wrote continues only where it means the same, for all pairs.

All steps have the same gradient, so state tends to a value that shows what it means: a mean to the
gradient, a sum to a multiple of it, a mean of normalized gradients to ones. The table of pairs in
docs/how_to/checkpoints.md is written by ``python -m tests.unit.fsdp2.test_other_optimizers``.
"""

import copy
import logging
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig
from megatron_eopt.config.registry import optimizer_names
from megatron_eopt.fsdp2 import build_optimizer
from tests.unit.fsdp2.model import eager

NAMES = optimizer_names()
STEPS = 24
PAGE = Path(__file__).parents[3] / "docs/how_to/checkpoints.md"
BEGIN, END = "<!-- pairs of optimizers -->\n", "<!-- end of pairs -->\n"
WORDS = {"refused": "name it"}


def config(name: str, **fields: Any) -> EmergingOptimizerConfig:
    return EmergingOptimizerConfig(
        optimizer=name, lr=1e-7, weight_decay=0.0, clip_grad=0.0, sgd_momentum=0.8, **fields
    )


def built(name: str, **fields: Any) -> tuple[nn.Parameter, Any]:
    model = nn.Sequential(nn.Linear(6, 6, bias=False))
    nn.init.constant_(model[0].weight, 1 / 6)  # doubly stochastic, as Sinkhorn Muon needs
    optimizer = build_optimizer(model, config(name, **fields))
    for group in optimizer.param_groups:
        # with these decays, means of equal gradients converge
        group |= {k: v for k, v in {"momentum": 0.8, "betas": (0.8, 0.8)}.items() if k in group}
    return model[0].weight, optimizer


@cache
@eager
def trained(name: str) -> Any:
    """Return an optimizer's state dict after steps with the same gradient."""
    weight, optimizer = built(name)
    gradient = 0.01 * torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(STEPS):
        weight.grad = gradient.clone()
        optimizer.step()
    return copy.deepcopy(optimizer.state_dict())


def values(state_dict: Any) -> dict[str, Any]:
    return {key: value for key, value in state_dict["state"].get(0, {}).items() if key != "step"}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@cache
def outcome(writer: str, reader: str) -> str:
    """Load one optimizer's state into another, check what it means there, and say what happened."""
    _, optimizer = built(reader)
    before, saved = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(trained(writer))
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    refusal = ""
    try:
        optimizer.load_state_dict(saved)
    except ConfigurationError as error:
        refusal = str(error)
    if refusal:
        assert f"{writer}'s" in refusal
        assert same(before, optimizer.state_dict())
        assert groups == [{**group, "params": []} for group in optimizer.param_groups]
        return "refused"
    assert same(saved, trained(writer))
    own, start, found = values(trained(reader)), values(before), values(optimizer.state_dict())
    assert found.keys() == own.keys()
    if writer != reader:
        assert groups == [{**group, "params": []} for group in optimizer.param_groups]
        if all(same(found[key], start[key]) for key in own):
            return "fresh"
    for key, value in found.items():
        if isinstance(value, torch.Tensor) and value.dim():
            torch.testing.assert_close(value, own[key], rtol=0.1, atol=1e-4)
    old = values(saved)
    exact = all(key in old and same(value, old[key]) for key, value in found.items())
    return "continues" if exact else "converted"


@pytest.mark.parametrize("reader", NAMES)
def test_state_continues_only_where_it_means_the_same(reader):
    outcomes = {writer: outcome(writer, reader) for writer in NAMES}
    assert outcomes[reader] == "continues"


def table() -> str:
    """Return the table of all pairs; optimizers that behave alike share a row and a column."""
    alike: dict[Any, list[str]] = {}
    for name in NAMES:
        others = [(outcome(name, other), outcome(other, name)) for other in NAMES]
        alike.setdefault(str(others), []).append(name)
    groups = list(alike.values())
    rows = [["from, down; to, right", *(", ".join(group) for group in groups)]]
    rows.append(["---"] * len(rows[0]))
    for writers in groups:
        cells = [outcome(writers[-1], readers[0]) for readers in groups]
        rows.append([", ".join(writers), *(WORDS.get(cell, cell) for cell in cells)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def test_the_page_has_the_table():
    assert BEGIN + table() + END in PAGE.read_text()


def test_settings_of_another_optimizer_are_left_alone():
    _, optimizer = built("lion")
    saved = copy.deepcopy(trained("adam"))
    saved["param_groups"][0]["betas"] = (0.7, 0.7)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.8)
    assert "eps" not in optimizer.param_groups[0]


@pytest.mark.parametrize("reader", ["adam", "lion", "muon"])
def test_what_is_named_starts_fresh_as_a_whole(reader, caplog):
    _, optimizer = built(reader, ckpt_allow_missing_optim_state=("exp_avg",))
    before = copy.deepcopy(optimizer.state_dict())
    with caplog.at_level(logging.WARNING):
        optimizer.load_state_dict(copy.deepcopy(trained("laprop")))
    assert same(before["state"], optimizer.state_dict()["state"])
    assert "starts fresh" in caplog.text


@pytest.mark.parametrize("writer", NAMES)
def test_muon_takes_only_a_mean_of_gradients_as_its_momentum(writer):
    _, optimizer = built("muon", checkpoint_momentum_from_adam=True)
    optimizer.load_state_dict(copy.deepcopy(trained(writer)))
    momentum = values(optimizer.state_dict())["momentum_buffer"]
    means_of = "adam", "lion", "oblique_adam", "psgd_pro"
    if writer in means_of or outcome(writer, "muon") != "fresh":
        own = values(trained("muon"))["momentum_buffer"]
        torch.testing.assert_close(momentum, own, rtol=0.1, atol=1e-4)
    else:
        assert not momentum.any()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("writer", ["laprop", "soap"])
def test_torchs_distributed_checkpoints_tell_who_wrote_them(tmp_path, writer, flat):
    """They are loaded in place, without a word about another optimizer."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    folder = str(tmp_path)
    for name in (writer, "lion"):
        weight, optimizer = built(name)
        model = nn.Sequential(nn.Linear(6, 6, bias=False))
        model[0].weight = weight
        if name == writer:
            optimizer.load_state_dict(copy.deepcopy(trained(writer)))
        state = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
        if name == writer:
            checkpoint.save(state, checkpoint_id=folder, no_dist=True)
            continue
        checkpoint.load(state, checkpoint_id=folder, no_dist=True)
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
        assert not values(optimizer.state_dict())["exp_avg"].any()


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", BEGIN + table() + END, text, flags=re.DOTALL))
