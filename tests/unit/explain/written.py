"""Checkpoints of all kinds, and what wrote them."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.harness.scene import forget_megatron
from tests.unit.fsdp2.model import config, eager
from tests.unit.fsdp2.model import train as train_fsdp2
from tests.unit.stores.full_state import Case, build, full_state, sharded, steps, unwrapped
from tests.unit.stores.runs import DENSE, MOE, global_name

BF16 = {**DENSE, "dtype": torch.bfloat16}
TP = {"tp": 2}
NORMUON = {"adaptive_muon_moment2_method": "normuon"}
PLAIN = {"use_distributed_optimizer": False}
CASES = {
    "muon": Case(model=BF16),
    "muon, TP": Case(parallel=TP),
    "experts": Case(model=MOE, parallel={"ep": 2}),
    "soap": Case("soap"),
    "soap, TP, plain": Case("soap", parallel=TP, config=PLAIN, ddp=PLAIN),
    "normuon": Case("adaptive_muon", config=NORMUON),
    "few bits": Case(config={"muon_momentum_dtype": "fp8"}),
    "plain": Case(config=PLAIN, ddp=PLAIN),
    "adam": Case("adam"),
    "buckets": Case("adam", form="dp_reshardable"),
}


@dataclass
class Written:
    """What one rank knows of a checkpoint.

    Attributes:
        steps: Elements of each parameter of this rank, by optimizer and name in the whole model.
        state: Elements and bytes of each kind of state, for the whole model.
    """

    steps: dict[str, dict[str, int]] = field(default_factory=dict)
    state: dict[str, list[int]] = field(default_factory=dict)


def write(folder: str) -> dict[str, Written]:
    """Save a checkpoint of each case, and return what it must hold."""
    found = {}
    for name, case in CASES.items():
        chunk, optimizer = build(case)
        steps(case, chunk, optimizer, 0, 2)
        into = Path(folder, name)
        into.mkdir(exist_ok=True)
        dist_checkpointing.save(sharded(case, chunk, optimizer, is_loading=False), str(into))
        found[name] = written(case, chunk, optimizer)
        if name in ("muon", "plain"):
            write_rank_file(into.with_name(f"{name}, torch"), chunk, optimizer)
        forget_megatron()
    return found


def written(case: Case, chunk: Any, optimizer: Any) -> Written:
    names = {param: global_name(name, case.model) for name, param in chunk.named_parameters()}
    found = Written()
    for member in optimizer.members:
        for driver, params in zip(member.drivers, member.params, strict=True):
            (optimizer_name,) = {group["optimizer"] for group in member.groups_of(driver)}
            its = found.steps.setdefault(optimizer_name, {})
            its.update({names[param]: param.numel() for param in params})
    for key, value in full_state(case, chunk, optimizer).items():
        if key.startswith("optimizer.") and isinstance(value, torch.Tensor):
            amount = found.state.setdefault(key.split(".")[2], [0, 0])
            amount[0] += value.numel()
            amount[1] += value.nbytes
    return found


def write_rank_file(folder: Path, chunk: Any, optimizer: Any) -> None:
    """Save as the trainer does in the format ``torch``."""
    place = folder / "mp_rank_00"
    place.mkdir(parents=True, exist_ok=True)
    sharded_storage = folder.name.startswith("muon")
    if sharded_storage:
        rank = distributed.get_rank()
        optimizer.save_state_dict_to_file(str(place / f"layer_wise_optimizer_{rank}.pt"))
    if distributed.get_rank() == 0:
        args = argparse.Namespace(
            tensor_model_parallel_size=1,
            data_parallel_size=2,
            use_distributed_optimizer=sharded_storage,
            optimizer="muon",
        )
        content = {
            "args": args,
            "iteration": 2,
            "model": unwrapped(chunk).state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        torch.save(content, place / "model_optim_rng.pt")


@eager
def write_fsdp2(folder: str) -> dict[str, int]:
    """Save with torch's distributed checkpoint; return the elements of each parameter."""
    model, optimizer = train_fsdp2("fsdp", config("soap"), steps=1)
    saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    checkpoint.save(saved, checkpoint_id=folder)
    return {name: param.numel() for name, param in model.named_parameters()}
