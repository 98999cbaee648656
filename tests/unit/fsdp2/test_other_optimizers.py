"""State that another optimizer wrote continues only where it means the same, for all pairs.

All steps have the same gradient, so state tends to a value that shows what it means: a mean to the
gradient, a sum to a multiple of it, a mean of normalized gradients to ones. Writers are all
optimizers of this package, and all classes of torch, timm, transformers, megatron-core and
emerging-optimizers. The table of pairs in docs/reference/changing_optimizers.md is written by
``python -m tests.unit.fsdp2.test_other_optimizers``.
"""

import copy
import itertools
import logging
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig
from megatron_eopt.base.nested_state import leaves
from megatron_eopt.checkpoint.saved_groups import writers_of
from megatron_eopt.config.registry import meaning_of, optimizer_names
from megatron_eopt.config.writers import MAXIMA, MEAN, SQUARES, SUM, UNKNOWN
from megatron_eopt.fsdp2 import build_optimizer
from tests.harness.log import listening
from tests.harness.tiers import mostly_long
from tests.harness.writers import DECAY, STEPS, classes, gradient, made, train, writers, written
from tests.unit.fsdp2.model import eager

NAMES = optimizer_names()
PAGE = Path(__file__).parents[3] / "docs/reference/changing_optimizers.md"
NO_NAMES = {"timm.optim.Lookahead", "torch.optim.LBFGS", "torch.optim.SparseAdam"}
NO_NAMES |= {"emerging_optimizers.PSGDPro"}
"""Classes whose state torch's functions cannot name or flatten."""
BEGIN, END = "<!-- pairs of optimizers -->\n", "<!-- end of pairs -->\n"
WORDS = {"refused": "name it"}


def config(name: str, **fields: Any) -> EmergingOptimizerConfig:
    return EmergingOptimizerConfig(
        optimizer=name, lr=1e-7, weight_decay=0.0, clip_grad=0.0, sgd_momentum=DECAY, **fields
    )


def built(name: str, **fields: Any) -> tuple[nn.Parameter, Any]:
    model = nn.Sequential(nn.Linear(6, 6, bias=False))
    nn.init.constant_(model[0].weight, 1 / 6)  # doubly stochastic, as Sinkhorn Muon needs
    optimizer = build_optimizer(model, config(name, **fields))
    for group in optimizer.param_groups:
        # with these decays, means of equal gradients converge
        group |= {
            k: v for k, v in {"momentum": DECAY, "betas": (DECAY, DECAY)}.items() if k in group
        }
    return model[0].weight, optimizer


@cache
@eager
def trained(name: str) -> Any:
    """Return an optimizer's state dict after steps with the same gradient."""
    if name in writers():
        return written(name)
    weight, optimizer = built(name)
    for _ in range(STEPS):
        weight.grad = gradient()
        optimizer.step()
    return copy.deepcopy(optimizer.state_dict())


def values(state_dict: Any) -> dict[str, Any]:
    """Return state without step counts, with factors in lists as whole matrices have them."""
    state = state_dict["state"].get(0, {})
    return {"/".join(path): value for path, value in leaves(state) if path[-1] != "step"}


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
    saved = copy.deepcopy(trained(writer))
    for group in saved["param_groups"]:
        # settings of another optimizer, such as Lion's betas, are not for this one
        group |= {"betas": (0.7,) * len(group["betas"])} if "betas" in group else {}
    given = copy.deepcopy(saved)
    result = outcome_of(lambda: optimizer.load_state_dict(saved), writer, reader, optimizer)
    assert same(saved, given)
    return result


def outcome_of(load: Callable[[], Any], writer: str, reader: str, optimizer: Any) -> str:
    """Let ``load`` load a writer's state, check what it means, and say what happened."""
    before = copy.deepcopy(optimizer.state_dict())
    groups = settings_of(optimizer)
    refusal = ""
    with listening() as log:
        try:
            load()
        except (ConfigurationError, CheckpointException, KeyError) as error:
            refusal = str(error)
    if refusal:
        assert ("0.weight" if writer in writers() else f"{writer}'s") in refusal
        assert same(before, optimizer.state_dict())
        assert groups == settings_of(optimizer)
        return "refused"
    saved = trained(writer)
    own, start, found = values(trained(reader)), values(before), values(optimizer.state_dict())
    assert found.keys() >= own.keys()
    is_same_class = writers_of(saved["param_groups"][0]) == (reader,)
    if not is_same_class:
        assert groups == settings_of(optimizer)
    if writer != reader and all(same(found[key], start[key]) for key in own):
        assert any("starts fresh" in line for line in log)
        return "fresh"
    dampening = optimizer.param_groups[0].get("dampening", 0.0)
    for key, value in found.items():
        if isinstance(value, torch.Tensor) and value.dim() and key in own:
            meaning = meaning_of(reader, key)
            if is_same_class and meaning not in MEANT:
                assert same(value, values(saved)[key])  # also if it is drawn
                continue
            expected = MEANT.get(meaning, own[key].double())
            # the same class has taken this setting, too
            expected = expected * (1 - dampening) if meaning == SUM else expected
            # averages have converged to 0.5 %
            torch.testing.assert_close(value.double(), expected, rtol=0.02, atol=1e-9)
    old = values(saved)
    exact = all(key in old and same(found[key], old[key]) for key in own)
    return "continues" if exact else "converted"


MEANT = {
    MEAN: gradient().double(),
    SQUARES: gradient().double() ** 2,
    MAXIMA: gradient().double() ** 2,
    SUM: gradient().double() / (1 - DECAY),
}
"""What state tends to that has a meaning."""


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    return [{**group, "params": []} for group in optimizer.param_groups]


@pytest.mark.parametrize("reader", NAMES)
def test_state_continues_only_where_it_means_the_same(reader):
    outcomes = {writer: outcome(writer, reader) for writer in NAMES}
    assert outcomes[reader] == "continues"


@pytest.mark.parametrize("writer", writers())
def test_state_of_other_packages_continues_only_where_it_means_the_same(writer):
    outcomes = {reader: outcome(writer, reader) for reader in NAMES}
    (wrote, *others) = writers_of(trained(writer)["param_groups"][0])
    if wrote in NAMES and not others:
        # the same class, also if another package has built it
        assert outcomes[wrote] == "continues"
    if wrote == UNKNOWN:
        assert {*outcomes.values()} == {"fresh"}


def table() -> str:
    """Return the table of all pairs; optimizers that behave alike share a row and a column."""
    alike: dict[Any, list[str]] = {}
    for name in NAMES:
        others = [(outcome(name, other), outcome(other, name)) for other in NAMES]
        others += [outcome(other, name) for other in classes()]
        alike.setdefault(str(others), []).append(name)
    groups = list(alike.values())
    head = ["from, down; to, right", *map(", ".join, groups)]
    own = {cells_of(its[-1], groups): its for its in groups}
    rows = {cells: [*its] for cells, its in own.items()}
    for name in sorted(classes(), key=lambda name: not name.startswith("torch")):
        cells = cells_of(name, groups)
        # most classes of emerging-optimizers are in rows of this package, under other names
        if name.startswith(("torch", "timm", "transformers")) or cells not in own:
            rows.setdefault(cells, []).append(name)
    rest = ("fresh",) * len(groups)
    rows = {**{cells: its for cells, its in rows.items() if cells != rest}, rest: ["any other"]}
    lines = [head, ["---"] * len(head), *([", ".join(its), *cells] for cells, its in rows.items())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cells_of(writer: str, readers: list[list[str]]) -> tuple[str, ...]:
    cells = [outcome(writer, names[0]) for names in readers]
    return tuple(WORDS.get(cell, cell) for cell in cells)


def test_the_page_has_the_table():
    pytest.importorskip("timm")
    pytest.importorskip("transformers")
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


def through_torch(writer: str, reader: str, form: str, folder: Path) -> str:
    """Load a writer's state by torch's functions; say what happened."""
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
    theirs, ours = (nn.Sequential(nn.Linear(6, 6, bias=False)) for _ in range(2))
    nn.init.constant_(theirs[0].weight, 1 / 6)
    other = made(writer, theirs[0].weight)
    train(other, theirs[0].weight)
    saved = get_optimizer_state_dict(theirs, other, options=options)
    if form == "files":
        checkpoint.save({"optimizer": saved}, checkpoint_id=folder, no_dist=True)
        # torch reads into what it is given, and only the class that wrote the files has all of it
        saved = get_optimizer_state_dict(theirs, made(writer, theirs[0].weight))
        checkpoint.load({"optimizer": saved}, checkpoint_id=folder, no_dist=True)
    ours[0].weight, optimizer = built(reader)

    def load() -> None:
        set_optimizer_state_dict(ours, optimizer, saved, options=options)

    return outcome_of(load, writer, reader, optimizer)


@pytest.mark.parametrize("form", ["by name", "flattened", "files"])
@pytest.mark.parametrize(
    ("writer", "reader"),
    mostly_long(
        itertools.product([name for name in writers() if name not in NO_NAMES], NAMES),
        ("emerging_optimizers.LaProp", "adam"),
        ("emerging_optimizers.LaProp", "laprop"),
        ("torch.optim.AdamW", "adam"),
        ("torch.optim.RMSprop, momentum", "muon"),
        ("torch.optim.SGD, dampening", "muon"),
        ("torch.optim.SGD, dampening", "sgd"),
        ("torch.optim.Adam, maximize", "lion"),
    ),
)
def test_torchs_functions_load_the_same_state(tmp_path, writer, reader, form):
    allowed = {outcome(writer, reader)} | ({"refused"} if form == "flattened" else set())
    assert through_torch(writer, reader, form, tmp_path) in allowed


@pytest.mark.parametrize("writer", ["emerging_optimizers.LaProp", "torch.optim.Adam"])
def test_files_of_another_class_are_not_read_in_place(tmp_path, writer):
    """Even if all tensors fit, its groups lack what ours have, so torch reads nothing."""
    theirs, ours = (nn.Sequential(nn.Linear(6, 6, bias=False)) for _ in range(2))
    other = made(writer, theirs[0].weight)
    train(other, theirs[0].weight)
    saved = {"optimizer": get_optimizer_state_dict(theirs, other)}
    checkpoint.save(saved, checkpoint_id=tmp_path, no_dist=True)
    ours[0].weight, optimizer = built("adam")
    state = {"optimizer": get_optimizer_state_dict(ours, optimizer)}
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointException, match="param_groups"):
        checkpoint.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert same(before, optimizer.state_dict())


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", BEGIN + table() + END, text, flags=re.DOTALL))
