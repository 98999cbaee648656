"""State dicts of torch's own optimizers that cannot be loaded as they are, and the ways out."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dicts

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.state.groups import match_all
from tests.functional.doc_commands import ROOT
from tests.unit.checkpoint.test_load_rule import same
from tests.unit.fsdp2.models import FLAT, eager

CLASSES: dict[str, Any] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": functools.partial(torch.optim.SGD, momentum=0.9),
    "muon": torch.optim.Muon,
}


class Model(nn.Module):
    """Two matrices, two vectors and a table; nothing that can be run."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)


def ours(model: nn.Module, name: str) -> Any:
    return build_optimizer(model, EmergingOptimizerConfig(optimizer=name, lr=1e-3, clip_grad=0.0))


def step(model: nn.Module, optimizer: Any) -> None:
    for number, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, 1.0 + number)
    optimizer.step()
    # with gradients torch's functions would not create state
    model.zero_grad(set_to_none=True)


def params_of(model: nn.Module, groups: str) -> list[dict[str, Any]]:
    """Return a script's groups."""
    if groups == "matrices":
        return [{"params": [model.up.weight, model.down.weight]}]
    if groups == "all":
        return [{"params": list(model.parameters())}]
    if groups == "by dimension":
        params = list(model.parameters())
        return [
            {"params": [p for p in params if (p.dim() > 1) == is_matrix]} for is_matrix in (1, 0)
        ]
    # as many as ours, of as many parameters, in another order
    order = [group["params"][::-1] for group in ours(model, "adam").param_groups]
    return [{"params": its} for its in order]


@pytest.mark.parametrize("reader", ["adam", "sgd", "muon", "soap"])
@pytest.mark.parametrize(
    ("writer", "groups"),
    [
        *((w, g) for w in ("adam", "adamw", "sgd") for g in ("matrices", "all")),
        ("muon", "matrices"),
    ],
)
def test_a_plain_load_names_both_ways_out(writer: str, groups: str, reader: str) -> None:
    model = Model()
    theirs = CLASSES[writer](params_of(model, groups), lr=1e-3)
    step(model, theirs)
    optimizer = ours(model, reader)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ConfigurationError, match="without names of parameters") as error:
        optimizer.load_state_dict(theirs.state_dict())
    assert same(before, optimizer.state_dict())
    said = ("get_optimizer_state_dict", "set_optimizer_state_dict", "param_names")
    assert all(text in str(error.value) for text in said)


@pytest.mark.parametrize("writer", ["adam", "adamw", "sgd"])
def test_another_order_is_refused_where_shapes_tell_it(writer: str) -> None:
    model = Model()
    reader = "sgd" if writer == "sgd" else "adam"
    theirs = CLASSES[writer](params_of(model, "reversed"), lr=1e-3)
    step(model, theirs)
    optimizer = ours(model, reader)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ConfigurationError, match=r"weight: .*must have shape.*set_optimizer_s"):
        optimizer.load_state_dict(theirs.state_dict())
    assert same(before, optimizer.state_dict())


@pytest.mark.parametrize("groups", ["all", "by dimension", "reversed"])
@pytest.mark.parametrize("writer", ["adam", "adamw", "sgd"])
def test_named_state_is_loaded(writer: str, groups: str) -> None:
    model = Model()
    theirs = CLASSES[writer](params_of(model, groups), lr=1e-3)
    step(model, theirs)
    # as from a file
    again = CLASSES[writer](params_of(model, groups), lr=1e-3)
    again.load_state_dict(copy.deepcopy(theirs.state_dict()))
    optimizer = ours(model, "sgd" if writer == "sgd" else "adam")
    dicts.set_optimizer_state_dict(model, optimizer, dicts.get_optimizer_state_dict(model, again))
    for param in model.parameters():
        for key, value in theirs.state[param].items():
            assert torch.equal(torch.as_tensor(optimizer.state[param][key]), value), key


@pytest.mark.parametrize("change", [torch.Tensor.int, torch.Tensor.to_sparse])
def test_state_of_other_numbers_is_named(change: Any) -> None:
    model = Model()
    optimizer = ours(model, "adam")
    step(model, optimizer)
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = change(saved["state"][0]["exp_avg"])
    with pytest.raises(ConfigurationError, match="must be a dense tensor of real numbers"):
        ours(model, "adam").load_state_dict(saved)


def test_groups_of_another_optimizer_are_named() -> None:
    saved, own = (ours(Model(), name).param_groups for name in ("soap", "muon"))
    with pytest.raises(ConfigurationError, match=r"it lacks .*muon.* and has .*soap"):
        match_all(saved, own)
    core = [{"wd_mult": 1.0, "lr_mult": 2.0, "optimizer": "soap"}]
    with pytest.raises(ConfigurationError, match=r"wd_mult=1\.0, optimizer=soap, lr_mult=2"):
        match_all(core, own)


def row_about(error: BaseException) -> str:
    """Return the row of the page on errors that quotes a part of an error."""
    page = (ROOT / "docs/how_to/troubleshooting.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    (found,) = (row for row in rows if row.split("`")[1] in str(error))
    return found


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        *((writer, reader) for writer in ("adamw", "sgd") for reader in ("adam", "sgd", "muon")),
        # into Adam, torch finds all settings, and the load begins
        *((writer, reader) for writer in ("soap", "lion") for reader in ("sgd", "muon")),
    ],
)
@eager
def test_flattened_state_goes_over_by_way_of_its_own_optimizer(writer: str, reader: str) -> None:
    def of_writer() -> Any:
        if writer in CLASSES:
            return CLASSES[writer](params_of(model, "all"), lr=1e-3)
        return ours(model, writer)

    model = Model()
    theirs = of_writer()
    step(model, theirs)
    saved = copy.deepcopy(dicts.get_optimizer_state_dict(model, theirs, options=FLAT))
    with pytest.raises(KeyError) as error:
        dicts.set_optimizer_state_dict(model, ours(model, reader), saved, options=FLAT)
    assert "`get_optimizer_state_dict`" in row_about(error.value)
    old = of_writer()
    dicts.set_optimizer_state_dict(model, old, saved, options=FLAT)
    state = dicts.get_optimizer_state_dict(model, old)
    optimizer = ours(model, reader)
    dicts.set_optimizer_state_dict(model, optimizer, state)
    expected = ours(model, reader)
    dicts.set_optimizer_state_dict(model, expected, dicts.get_optimizer_state_dict(model, theirs))
    assert same(expected.state_dict(), optimizer.state_dict())
