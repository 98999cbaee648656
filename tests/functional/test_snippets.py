"""The Python of the pages runs, block by block, with what a page leaves to the reader's program."""

import dataclasses
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer import OptimizerConfig
from torch import nn

import megatron_eopt
from megatron_eopt import EmergingOptimizerConfig, TorchOptimizerConfig, get_megatron_optimizer
from megatron_eopt.config.registry import entries
from tests.functional.doc_commands import PAGES, ROOT, blocks
from tests.harness.each_rank import on_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import synthetic_batch, tiny_gpt, train_step, wrap_ddp

ELSEWHERE = {
    "@register_storage": "tests/unit/wrappers/test_own_storage.py",
    "from my_package import": "tests/unit/test_conformance.py",
    "[muon, adamw]": "tests/unit/fsdp2/test_torch_muon.py",
    "dcp.load(": "tests/functional/long/test_first_days.py",
    "fully_shard_model(": "tests/unit/megatron_fsdp/test_layouts.py",
    "pretrain(...)": "scripts/pretrain_gpt.py is this script, whole",
    "MuonTrainer(": "tests/functional/test_other_trainers.py",
    "torch.optim.lr_scheduler.Cosine": "tests/functional/test_other_trainers.py",
    "def train(model, batches": "tests/functional/test_other_trainers.py",
    "lightning.": "tests/functional/test_other_trainers.py",
    "torchtitan": "tests/functional/test_other_trainers.py",
}
"""Blocks with such a text are parsed alone, by test_docs.py; here is what runs instead."""


def readers_own() -> dict[str, Any]:
    """Return the names that snippets take from the reader's program."""
    chunk = wrap_ddp(tiny_gpt(layers=1), use_distributed_optimizer=True)
    config = EmergingOptimizerConfig(optimizer="muon", lr=2e-3, use_distributed_optimizer=True)
    train_step([chunk], get_megatron_optimizer(config, [chunk]), [synthetic_batch(0)])

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.gate_up = nn.Linear(8, 24), nn.Linear(8, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.qkv(x)[:, :8] + self.gate_up(x)[:, 8:16]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.lm_head = nn.ModuleList([Block()]), nn.Linear(8, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lm_head(self.blocks[0](x))

    imported = (megatron_eopt.build_optimizer, get_megatron_optimizer, dataclasses.dataclass)
    own = {one.__name__: one for one in (*imported, torch, dataclasses, megatron_eopt)}
    own |= {cls.__name__: cls for cls in (EmergingOptimizerConfig, TorchOptimizerConfig)}
    own |= {"model": Model(), "model_chunks": [chunk], "config": config, "iteration": 100}
    own |= {"q_rows": 8, "k_rows": 8, "v_rows": 8, "world_size": 1}
    own |= {"lstm": nn.LSTM(8, 6), "batches": [torch.ones(2, 8)]}
    own["cfg"] = SimpleNamespace(optimizer=OptimizerConfig())  # of Megatron-Bridge
    own["loss"] = lambda model, batch: model(batch).square().mean()
    return own


def for_checkpoints(own: dict[str, Any]) -> None:
    """Provide a wrapped model and its optimizer, saved to ``folder``."""
    (wrapped,) = own["model_chunks"]
    optimizer, model = own["get_megatron_optimizer"](own["config"], [wrapped]), wrapped.module
    folder = tempfile.mkdtemp()
    state = {"model": model.sharded_state_dict()}
    state["optimizer"] = optimizer.sharded_state_dict(model.sharded_state_dict())
    dist_checkpointing.save(state, folder)
    own.update(ddp_model=wrapped, optimizer=optimizer, folder=folder)


def blocks_here(page: Path) -> list[tuple[int, str]]:
    """Return the lines and texts of a page's blocks that run here."""
    found = blocks(page.read_text(), "python", "py")
    return [(line, text) for line, text in found if not any(one in text for one in ELSEWHERE)]


WITH_PYTHON = [page.relative_to(ROOT).as_posix() for page in PAGES if blocks_here(page)]


@pytest.mark.parametrize("name", WITH_PYTHON)
@on_ranks(1)
def test_snippets_run(name):
    """Those of a page, in order and in one namespace."""
    initialize_megatron()
    page = ROOT / name
    found, own = blocks_here(page), readers_own()
    assert found
    if page.name == "checkpoints.md":
        for_checkpoints(own)
    # what a page registers ends with it; what this process had imported before stays
    with mock.patch.dict(entries()):
        for line, text in found:
            # a process of the harness has no GPU
            code = compile("\n" * (line - 1) + text.replace('"cuda"', '"cpu"'), name, "exec")
            if "register_optimizer(" in text:
                # the page shows two ways to register one name
                entries().pop("sign_per_matrix", None)
            exec(code, own)
