"""What a load does depends on who wrote the state, and never on the form of the checkpoint."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
    preprocess_state_dict_for_uneven_dtensor,
)
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as dicts
from torch.distributed.tensor import DTensor

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig
from megatron_eopt.base.agreement import gather_objects
from megatron_eopt.base.nested_state import leaves
from megatron_eopt.checkpoint import fsdp_dtensor
from megatron_eopt.checkpoint.catalogue import read_catalogue
from megatron_eopt.checkpoint.keys import split_key
from megatron_eopt.config.registry import optimizer_names
from megatron_eopt.megatron_fsdp import build_optimizer
from megatron_eopt.state.rule import log_lines
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.harness.log import listening
from tests.harness.writers import writers, written
from tests.unit.fsdp2.models import eager
from tests.unit.megatron_fsdp import runs as of_fsdp
from tests.unit.storage.full_state import Case, build, full_state, resume_as, steps, write_as
from tests.unit.storage.runs import PLAIN, Run

TINY = {"layers": 1, "hidden": 16, "heads": 2, "query_groups": 1, "gated": True, "vocabulary": 32}

OUTCOMES = {
    ("adam", "adam"): "continues",
    ("adam", "lion"): "fresh",
    ("adam", "muon"): "fresh",
    ("laprop", "adam"): "fresh",
    ("lion", "adam"): "fresh",
    ("muon", "muon"): "continues",
    ("muon", "normuon"): "fresh",
    ("muon", "scion"): "fresh",
    ("normuon", "muon"): "fresh",
    ("normuon", "namo"): "fresh",
    ("normuon", "normuon"): "continues",
    ("scion", "scion"): "continues",
    ("sgd", "muon"): "fresh",
    ("soap", "adam"): "fresh",
    ("soap", "soap"): "continues",
}
"""What becomes of the state of a matrix, by the optimizers that save and load it."""

FEW = {
    pair: its for pair, its in OUTCOMES.items() if {*pair} <= {"adam", "muon", "normuon", "soap"}
}
some_or_all = pytest.mark.parametrize(
    "outcomes", [FEW, pytest.param(OUTCOMES, marks=pytest.mark.long)], ids=["some", "all"]
)
"""Own loops have all, in less time, and one rule decides for every form."""

FORMS = {
    "state dict": (1, "state_dict", PLAIN),
    "torch_dist": (1, "fully_reshardable", PLAIN),
    "torch_dist, sharded": (2, "fully_reshardable", {}),
}


def config_of(name: str) -> dict[str, Any]:
    """Return the fields that choose an optimizer, which may be a form of adaptive Muon."""
    if name in ("normuon", "namo"):
        return {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": name}
    return {"optimizer": name}


def case_of(name: str, storage: dict[str, Any]) -> Case:
    fields = config_of(name)
    return Case(fields.pop("optimizer"), TINY, ddp=storage, config={**storage, **fields})


def of_qkv(state: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of the state of one matrix."""
    parts = {key: split_key(key) for key in state}
    return {
        key: state[key]
        for key, said in parts.items()
        if said and said.kind not in (None, "param", "fp32_param", "step")
        if "linear_qkv.weight" in said.name and isinstance(state[key], torch.Tensor)
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def became(loaded: Any, saved: Any, start: Any, lines: list[str]) -> str:
    """Return what a load made of state, and check what the log says."""
    is_fresh = same(loaded, start)
    assert is_fresh == any("starts fresh" in line for line in lines)
    assert is_fresh or same(loaded, saved)
    return "fresh" if is_fresh else "continues"


type Pairs = list[tuple[str, str]]


def in_chains(pairs: Pairs, form: str, storage: dict[str, Any], folder: str) -> dict[Any, str]:
    """Save with each optimizer in one form, load into others, and return what became of it."""
    kept: dict[str, Any] = {}
    for name in {writer for writer, _ in pairs}:
        place = Path(folder, name)
        place.mkdir(exist_ok=True)
        case = case_of(name, storage)
        chunk, optimizer = build(case)
        steps(case, chunk, optimizer, 0, 2)
        weights = write_as(form, case, chunk, optimizer, place)
        kept[name] = weights, of_qkv(full_state(case, chunk, optimizer))
        forget_megatron()
    found, starts = {}, {}
    for reader in {reader for _, reader in pairs}:
        case = case_of(reader, storage)
        starts[reader] = of_qkv(full_state(case, *build(case)))
        forget_megatron()
    for writer, reader in pairs:
        case, (weights, saved) = case_of(reader, storage), kept[writer]
        with listening() as lines:
            chunk, optimizer = resume_as(form, case, Path(folder, writer), weights)
        loaded = of_qkv(full_state(case, chunk, optimizer))
        # rank 0 writes the log
        lines = lines if not distributed.get_rank() else ["starts fresh"] * (writer != reader)
        found[writer, reader] = became(loaded, saved, starts[reader], lines)
        forget_megatron()
    return found


@some_or_all
@pytest.mark.parametrize("form", FORMS)
def test_in_megatrons_formats(tmp_path, form, outcomes):
    ranks, *how = FORMS[form]
    for found in run_ranks(ranks, in_chains, [*outcomes], *how, str(tmp_path), timeout=300):
        assert found == outcomes


@eager
def in_fsdp_dtensor(pairs: Pairs, folder: str) -> dict[Any, str]:
    """Do the same in format ``fsdp_dtensor``, as the trainer does."""
    found = {}
    kept: dict[str, Any] = {}

    def built(name: str) -> tuple[Any, Any, Any]:
        run = Run(model=TINY, config=config_of(name))
        chunk = of_fsdp.make_chunk(run)
        return run, chunk, of_fsdp.make_optimizer(run, chunk)

    def asked(chunk: Any, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
        chunk.module._replace_param_with_distributed_if_needed()
        form = {"distrib_optim_sharding_type": "fsdp_dtensor"}
        state = {"optimizer": optimizer.sharded_state_dict({}, is_loading, metadata=form)}
        preprocess_state_dict_for_uneven_dtensor(state)
        return state

    def values(optimizer: Any) -> dict[str, Any]:
        inner = optimizer.chained_optimizers[0].optimizer
        number = next(n for n, name in inner.state_dict()["param_names"].items() if "qkv.w" in name)
        state = inner.state_dict()["state"][number]
        own = {k: v.to_local().clone() for k, v in state.items() if isinstance(v, DTensor)}
        own["step"] = torch.as_tensor(state.get("step", 0.0)).clone()
        # a rank may have no part of a weight
        return {"all": gather_objects(own)}

    for name in {writer for writer, _ in pairs}:
        run, chunk, optimizer = built(name)
        of_fsdp.stepped(run, chunk, optimizer, 0, 2)
        checkpoint.save(asked(chunk, optimizer, is_loading=False), checkpoint_id=f"{folder}/{name}")
        kept[name] = values(optimizer)
        forget_megatron()
    for writer, reader in pairs:
        _, chunk, optimizer = built(reader)
        start, place = values(optimizer), Path(folder, writer)
        state = asked(chunk, optimizer, is_loading=True)
        storage = optimizer.chained_optimizers[0]
        report = fsdp_dtensor.match(storage, state["optimizer"], read_catalogue(place))
        with listening() as lines:
            log_lines(report.lines)
        checkpoint.load(state, checkpoint_id=place)
        optimizer.load_state_dict(state["optimizer"])
        # rank 0 writes the log
        lines = lines if not distributed.get_rank() else ["starts fresh"] * (writer != reader)
        found[writer, reader] = became(values(optimizer), kept[writer], start, lines)
        forget_megatron()
    return found


@some_or_all
def test_in_fsdp_dtensor(tmp_path, outcomes):
    for found in run_ranks(2, in_fsdp_dtensor, [*outcomes], str(tmp_path), timeout=300):
        assert found == outcomes


# own loops, and optimizers of other packages

CONTINUES = {
    "torch.optim.Adam": "adam",
    "torch.optim.Adam, amsgrad": "adam",
    "torch.optim.AdamW": "adam",
    "torch.optim.SGD": "sgd",
    "torch.optim.Muon": "muon",
    "megatron.core.TensorParallelMuon": "momentum",
    "emerging_optimizers.AdaptiveMuon": "adaptive_muon",
    "emerging_optimizers.LaProp": "laprop",
    "emerging_optimizers.Lion": "lion",
    "emerging_optimizers.MOP": "momentum",
    "emerging_optimizers.Muon": "momentum",
    "emerging_optimizers.MuonHyperball": "momentum",
    "emerging_optimizers.ObliqueAdam": "oblique_adam",
    "emerging_optimizers.ObliqueSGD": "oblique_sgd",
    "emerging_optimizers.PSGDPro": "psgd_pro",
    "emerging_optimizers.PolarGrad": "momentum",
    "emerging_optimizers.REKLS": "soap or rekls",
    "emerging_optimizers.SOAP": "soap or rekls",
    "emerging_optimizers.Scion": "momentum",
    "emerging_optimizers.SinkhornMuon": "momentum",
    "emerging_optimizers.Spel": "momentum",
    "torch.optim.SGD, dampening": "none, but known as sgd",
    "torch.optim.SGD, maximize": "none, but known as sgd",
    "torch.optim.Adam, maximize": "none, but known as adam",
}
"""Classes by the optimizer that their state continues as; no other class is known.

Those with a momentum as their only setting cannot be told apart, so the reader is believed.
"""

WITH_MOMENTUM = {"mop", "muon", "muon_hyperball", "polargrad", "scion", "sinkhorn_muon", "spel"}
OF_GROUPS = {"momentum": WITH_MOMENTUM, "soap or rekls": {"soap", "rekls"}}


def expected(writer: str, reader: str) -> str:
    """Return what is to become of another class's state."""
    name = CONTINUES.get(writer, "unknown")
    believed = OF_GROUPS.get(name, {name})
    if reader in believed:
        # it also needs the radius, which only its own class has
        lacks = reader == "muon_hyperball" and not writer.endswith("Hyperball")
        return "refused" if lacks else "continues"
    is_told = name in ("adam", "sgd") or "known as" in name or writer == "torch.optim.Muon"
    return "fresh" if is_told else "refused"


def built(name: str) -> Any:
    model = nn.Sequential(nn.Linear(6, 6, bias=False))
    nn.init.constant_(model[0].weight, 1 / 6)  # doubly stochastic, as Sinkhorn Muon needs
    fields = {"lr": 1e-7, "weight_decay": 0.0, "clip_grad": 0.0, "sgd_momentum": 0.8}
    return model, build_optimizer(model, EmergingOptimizerConfig(**config_of(name), **fields))


def values_of(state_dict: Any) -> dict[str, Any]:
    """Return state without step counts, with factors in lists as whole matrices have them."""
    state = state_dict["state"].get(0, {})
    return {"/".join(path): value for path, value in leaves(state) if path[-1] != "step"}


def as_in_json(value: Any) -> Any:
    """Return a state dict whose keys are words, as in JSON, with its tensors."""
    if isinstance(value, dict):
        assert all(isinstance(key, str | int) for key in value)
        return {str(key): as_in_json(item) for key, item in value.items()}
    return [*map(as_in_json, value)] if isinstance(value, list | tuple) else value


def outcome_of(saved: Any, reader: str, form: str, folder: Path | None = None) -> str:
    """Load a state dict in one of several forms, and say what happened."""
    model, optimizer = built(reader)
    start = copy.deepcopy(optimizer.state_dict())
    given = copy.deepcopy(saved)
    if form == "raw files":
        asked = {"its": given}
        checkpoint.save(asked, checkpoint_id=folder, no_dist=True)
        checkpoint.load(asked, checkpoint_id=folder, no_dist=True)
        given = asked["its"]
    error = ""
    with listening() as lines:
        try:
            if form == "by name":
                dicts.set_optimizer_state_dict(model, optimizer, given)
            else:
                optimizer.load_state_dict(as_in_json(given) if form == "JSON" else given)
        except ConfigurationError as refused:
            error = str(refused)
    if error:
        assert same(start, optimizer.state_dict())
        assert re.search("--no-load-optim|get_optimizer_state_dict", error)
        return "refused"
    loaded = values_of(optimizer.state_dict())
    if form == "by name":
        saved = {"state": {0: saved["state"]["0.weight"]}}
    kept = {key: value for key, value in values_of(saved).items() if key in loaded}
    return became(loaded, {**loaded, **kept}, values_of(start), lines)


@eager
def trained(name: str) -> Any:
    model, optimizer = built(name)
    for _ in range(2):
        model[0].weight.grad = 0.01 * torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("form", ["state dict", "JSON", "by name", "raw files"])
def test_in_own_loops(tmp_path, form):
    for number, ((writer, reader), outcome) in enumerate(OUTCOMES.items()):
        model, optimizer = trained(writer)
        saved = optimizer.state_dict()
        if form == "by name":
            saved = dicts.get_optimizer_state_dict(model, optimizer)
        found = outcome_of(saved, reader, form, tmp_path / str(number))
        assert found == outcome, (writer, reader)


@pytest.mark.parametrize("writer", writers())
def test_of_other_packages(writer):
    saved = written(writer)
    for reader in optimizer_names():
        assert outcome_of(saved, reader, "state dict") == expected(writer, reader), reader
