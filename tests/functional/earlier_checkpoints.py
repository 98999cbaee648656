"""Checkpoints that release 0.1.0 wrote, with what they hold, to be loaded by later releases.

    python -m tests.functional.earlier_checkpoints FOLDER

writes their like with the release that is installed; an archive in the folder ``earlier`` holds one
of them. A checkpoint is of a run at tensor parallel 2 x data parallel 2 after two steps; beside it
lies what the run's whole state was, and what it was two steps later.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.harness import run_ranks
from tests.harness.scene import forget_megatron
from tests.unit.fsdp2.model import config as sharded_config
from tests.unit.fsdp2.model import set_gradients, train, weights, whole
from tests.unit.stores.full_state import Case, build, full_state, sharded, steps

MODEL = {
    "layers": 1,
    "hidden": 16,
    "heads": 4,
    "query_groups": 2,
    "gated": True,
    "bias": True,
    "dtype": torch.bfloat16,
}
FOUR = {"tp": 2}
PLAIN = {"use_distributed_optimizer": False}


def _adaptive(method: str) -> dict[str, Any]:
    return {"optimizer": "adaptive_muon", "config": {"adaptive_muon_moment2_method": method}}


_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {"optimizer": "muon"},
    "normuon": _adaptive("normuon"),
    "adamuon": _adaptive("adamuon"),
    "namo": _adaptive("namo"),
    "soap": {"optimizer": "soap"},
    "lion": {"optimizer": "lion"},
    "adam": {"optimizer": "adam"},
}


def _case(optimizer: str, *, plain: bool, parallel: dict[str, int], form: str) -> Case:
    fields = _OPTIMIZERS[optimizer]
    storage = PLAIN if plain else {}
    return Case(
        optimizer=fields["optimizer"],
        model=MODEL,
        parallel=parallel,
        ddp=storage,
        config={**storage, **fields.get("config", {})},
        form=form,
    )


def megatron_cases() -> dict[str, Case]:
    """Return the runs of megatron-core's models by the names of their folders."""
    cases = {}
    for name in _OPTIMIZERS:
        cases[f"sharded-{name}"] = _case(name, plain=False, parallel=FOUR, form="fully_reshardable")
        # without tensor parallelism: release 0.1.0 lost a part of this state with it
        parallel = {} if name == "adamuon" else FOUR
        cases[f"plain-{name}"] = _case(
            name, plain=True, parallel=parallel, form="fully_reshardable"
        )
    cases["sharded-adam-by-bucket"] = _case(
        "adam", plain=False, parallel=FOUR, form="dp_reshardable"
    )
    return cases


FSDP2 = {
    "fsdp2-muon": sharded_config(),
    "fsdp2-normuon": sharded_config("adaptive_muon", adaptive_muon_moment2_method="normuon"),
    "fsdp2-adamuon": sharded_config("adaptive_muon", adaptive_muon_moment2_method="adamuon"),
    "fsdp2-soap": sharded_config("soap"),
}
"""Runs of a plain PyTorch model under FSDP2 x TP, by the names of their folders."""


def write_megatron(folder: str) -> None:
    for name, case in megatron_cases().items():
        into = Path(folder, name)
        chunk, optimizer = build(case)
        steps(case, chunk, optimizer, 0, 2)
        dist_checkpointing.save(sharded(case, chunk, optimizer, is_loading=False), str(into))
        state = full_state(case, chunk, optimizer)
        steps(case, chunk, optimizer, 2, 4)
        later = full_state(case, chunk, optimizer)
        if distributed.get_rank() == 0:
            torch.save({"state": state, "later": later}, into / "expected.pt")
        forget_megatron()


def write_fsdp2(folder: str) -> None:
    for name, settings in FSDP2.items():
        model, optimizer = train("fsdp_tp", settings, steps=2)
        into = Path(folder, name)
        state_dict = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        checkpoint.save(state_dict, checkpoint_id=str(into))
        state = {
            f"{param}.{key}": whole(value) if isinstance(value, torch.Tensor) else value
            for param, entries in state_dict["optimizer"]["state"].items()
            for key, value in entries.items()
        }
        at_save = weights(model)
        for step in (2, 3):
            set_gradients(model, step)
            optimizer.step()
        later = weights(model)
        if distributed.get_rank() == 0:
            expected = {"state": state, "weights": at_save, "later": later}
            torch.save(expected, into / "expected.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the checkpoints go")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*megatron_cases(), *FSDP2):
        Path(folder, name).mkdir()
    run_ranks(4, write_megatron, str(folder), timeout=600)
    run_ranks(4, write_fsdp2, str(folder), cpu=False, timeout=600)


if __name__ == "__main__":
    main()
