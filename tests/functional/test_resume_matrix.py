"""Every optimizer in every storage and layout goes on as if it had not stopped."""

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from megatron.core import dist_checkpointing
from torch import Tensor, distributed
from torch.distributed import checkpoint
from torch.nn import functional

from megatron_eopt.config.registry import optimizer_names
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.testing.scene import forget_wrapped_models
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.unit.fsdp2 import models as fsdp2
from tests.unit.storage.full_state import Case, build, differences, full_state, resume, steps, write

Storage = Literal["replicated", "sharded", "FSDP2"]
STORAGES: tuple[Storage, ...] = ("replicated", "sharded", "FSDP2")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAYOUTS = tuple(itertools.product((1, 2), (1, 2)))
"""Tensor parallel, data parallel."""

OPTIMIZERS = (*fsdp2.METHODS, *(name for name in optimizer_names() if name != "adaptive_muon"))

EQUAL = "equal"
MODEL = {"layers": 1, "hidden": 16, "heads": 4, "query_groups": 2, "gated": True, "bias": True}


@dataclass(frozen=True, order=True)
class Cell:
    """One way of running an optimizer."""

    optimizer: str  # one of :data:`OPTIMIZERS`
    storage: Storage  # how weights are kept
    tensor: int  # tensor-parallel size
    data: int  # data-parallel size
    dtype: str  # of the model's weights

    @property
    def fields(self) -> dict[str, Any]:
        """Return what else a configuration says of the optimizer."""
        # it demands more of matrices than of fused ones
        return {"muon_split_qkv": False} if self.optimizer == "sinkhorn_muon" else {}

    @property
    def case(self) -> Case:
        """Return the run of a Megatron model."""
        storage = {"use_distributed_optimizer": self.storage == "sharded"}
        model = {**MODEL, "dtype": DTYPES[self.dtype]}
        name, config = self.optimizer, {**storage, **self.fields}
        if name in fsdp2.METHODS:
            name, config["adaptive_muon_moment2_method"] = "adaptive_muon", name
        return Case(name, model, {"tp": self.tensor}, storage, config)


def cells(
    optimizers: Iterable[str], storage: Storage, layout: tuple[int, int], dtypes: Iterable[str]
) -> list[Cell]:
    """Return the cells of one storage and one layout."""
    return [Cell(name, storage, *layout, dtype) for name in optimizers for dtype in dtypes]


def outcomes(some: list[Cell]) -> dict[Cell, str]:
    """Run cells of one storage and one layout, each stopped after two steps of four."""
    first = some[0]
    job = _of_fsdp2 if first.storage == "FSDP2" else _of_megatron
    with tempfile.TemporaryDirectory() as folder:
        how: Any = {"cpu": first.storage != "FSDP2", "timeout": 900}
        found = run_ranks(first.tensor * first.data, job, some, folder, **how)
    assert all(one.keys() == found[0].keys() for one in found)
    return {cell: max((r[cell] for r in found), key=lambda text: text != EQUAL) for cell in some}


@fsdp2.eager
def _of_megatron(some: list[Cell], folder: str) -> dict[Cell, str]:
    results = {}
    # once: every process group of gloo has threads that poll
    initialize_megatron(tp=some[0].tensor)
    for number, cell in enumerate(some):
        into = Path(folder, str(number))
        if distributed.get_rank() == 0:
            into.mkdir()
        results[cell] = _stopped_and_gone_on(cell, into)
        forget_wrapped_models()
    return results


def _to_domain_of(cell: Cell) -> Callable[[Any], None] | None:
    """Return what brings weights where an optimizer keeps them; None if that is anywhere."""
    if cell.optimizer.startswith("oblique"):
        return functools.partial(_change, lambda weight: functional.normalize(weight, dim=0))
    if cell.optimizer == "sinkhorn_muon":
        whole = MODEL["hidden"] if cell.storage == "sharded" else None
        return functools.partial(_change, functools.partial(_of_equal_sums, whole))
    return None


def _of_equal_sums(smaller: int | None, weight: Tensor) -> Tensor:
    """Return a weight whose matrices, of this smaller side, have sums of 1 along it."""
    return torch.full_like(weight, 1 / (smaller or min(weight.shape[-2:])))


def _change(change: Callable[[Tensor], Tensor], model: torch.nn.Module) -> None:
    for param in model.parameters():
        if param.dim() == 2:
            param.data.copy_(change(param.data.float()))


def _stopped_and_gone_on(cell: Cell, folder: Path) -> str:
    case, run = cell.case, build(cell.case, _to_domain_of(cell))
    steps(case, *run, 0, 2)
    write(case, *run, folder)
    steps(case, *run, 2, 4)
    expected = full_state(case, *run)
    chunk, optimizer = resume(case, folder, dist_checkpointing.load, _to_domain_of(cell))
    steps(case, chunk, optimizer, 2, 4)
    return _told(differences(expected, full_state(case, chunk, optimizer)))


@fsdp2.eager
def _of_fsdp2(some: list[Cell], folder: str) -> dict[Cell, str]:
    results = {}
    for number, cell in enumerate(some):
        layout = "fsdp_tp" if cell.tensor > 1 else "fsdp"
        settings = fsdp2.config(cell.optimizer, **cell.fields)
        model = fsdp2.make_model(layout, DTYPES[cell.dtype])
        if cell.optimizer == "sinkhorn_muon":
            _start_at_equal_sums(model)
        optimizer = build_optimizer(model, settings)
        _inject(model, optimizer, 0, 2)
        saved = {"optimizer": fsdp2.by_torch(model, optimizer)}
        checkpoint.save(saved, checkpoint_id=f"{folder}/{number}")
        at_save = fsdp2.weights(model)
        _inject(model, optimizer, 2, 4)
        expected = fsdp2.weights(model)
        model = fsdp2.make_model(layout, DTYPES[cell.dtype])
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(fsdp2.shard(at_save[name], param))
        optimizer = build_optimizer(model, settings)
        loaded = {"optimizer": fsdp2.by_torch(model, optimizer)}
        checkpoint.load(loaded, checkpoint_id=f"{folder}/{number}")
        fsdp2.load(fsdp2.by_torch, model, optimizer, loaded["optimizer"])
        _inject(model, optimizer, 2, 4)
        results[cell] = _told(differences(expected, fsdp2.weights(model)))
    return results


@torch.no_grad()
def _start_at_equal_sums(model: torch.nn.Module) -> None:
    for param in model.parameters():
        if param.dim() > 1:
            param.copy_(_of_equal_sums(None, param))
    model.up.weight.fill_(1 / 8)  # two matrices in one, eight rows each


def _inject(model: Any, optimizer: Any, first: int, end: int) -> None:
    for step in range(first, end):
        fsdp2.set_gradients(model, step)
        # a trainer restores the state of random numbers
        torch.manual_seed(step)
        optimizer.step()


def _told(names: list[str]) -> str:
    return f"differs: {', '.join(names)}" if names else EQUAL


def test_muon_goes_on():
    """The cell of the matrix that most people train in."""
    assert set(outcomes(cells(["muon"], "sharded", (2, 2), ["bf16"])).values()) == {EQUAL}


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("storage", STORAGES)
def test_every_optimizer_goes_on_in_every_layout(storage):
    for layout in LAYOUTS:
        results = outcomes(cells(OPTIMIZERS, storage, layout, DTYPES))
        assert len(results) == len(OPTIMIZERS) * len(DTYPES)
        assert {cell: result for cell, result in results.items() if result != EQUAL} == {}
