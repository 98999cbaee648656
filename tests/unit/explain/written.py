"""Checkpoints of all kinds, and what wrote them."""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from megatron_eopt.testing.scene import forget_megatron
from tests.unit.fsdp2.models import config, eager
from tests.unit.fsdp2.models import train as train_fsdp2
from tests.unit.storage.full_state import Case, build, full_state, steps, unwrapped
from tests.unit.storage.full_state import write as write_checkpoint
from tests.unit.storage.runs import DENSE, REPLICATED

BF16 = {**DENSE, "dtype": torch.bfloat16}
TP = {"tp": 2}
CASES = {
    "muon": Case(model=BF16),
    "muon, TP": Case(parallel=TP),
    "soap, TP, plain": Case("soap", parallel=TP, **REPLICATED),
    "plain": Case(**REPLICATED),
    "buckets": Case("adam", form="dp_reshardable", stock=True),
}


def write(folder: str) -> dict[str, dict[str, list[int]]]:
    """Save a checkpoint of each case; return elements and bytes of each kind of state."""
    found = {}
    for name, case in CASES.items():
        chunk, optimizer = build(case)
        steps(case, chunk, optimizer, 0, 2)
        into = Path(folder, name)
        write_checkpoint(case, chunk, optimizer, into)
        found[name] = written(case, chunk, optimizer)
        if name == "plain":
            write_rank_file(into.with_name(f"{name}, torch"), chunk, optimizer)
        forget_megatron()
    return found


def written(case: Case, chunk: Any, optimizer: Any) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for key, value in full_state(case, chunk, optimizer).items():
        if key.startswith("optimizer.") and isinstance(value, torch.Tensor):
            amount = found.setdefault(key.split(".")[2], [0, 0])
            amount[0] += value.numel()
            amount[1] += value.nbytes
    return found


def write_rank_file(folder: Path, chunk: Any, optimizer: Any) -> None:
    """Save as the trainer does in the format ``torch``."""
    place = folder / "mp_rank_00"
    place.mkdir(parents=True, exist_ok=True)
    if distributed.get_rank() == 0:
        content = {
            "args": argparse.Namespace(tensor_model_parallel_size=1, optimizer="muon"),
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
