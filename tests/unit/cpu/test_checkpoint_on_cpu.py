"""megatron.core.dist_checkpointing writes and reads under the CPU back end, in both layouts."""

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state

from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import tiny_gpt


def _save(folder: Path) -> dict[str, torch.Tensor]:
    initialize_megatron(tp=2)
    model: Any = tiny_gpt()
    dist_checkpointing.save(model.sharded_state_dict(), folder)
    return _weights(model)


def _load(folder: Path, tp: int) -> dict[str, torch.Tensor]:
    initialize_megatron(tp=tp, seed=5)
    model: Any = tiny_gpt()
    state = dist_checkpointing.load(model.sharded_state_dict(), folder)
    model.load_state_dict(state)
    return _weights(model)


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    assert parallel_state.model_parallel_is_initialized()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_saved_with_two_ranks_loaded_with_two_and_one(tmp_path: Path) -> None:
    saved = run_ranks(2, _save, tmp_path)
    loaded = run_ranks(2, _load, tmp_path, 2)
    for before, after in zip(saved, loaded, strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    (whole,) = run_ranks(1, _load, tmp_path, 1)
    name = "embedding.word_embeddings.weight"
    assert torch.equal(whole[name], torch.cat([rank[name] for rank in saved]))
