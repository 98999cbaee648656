"""The model's weights load at any size of tensor parallelism and weight rematerialization."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing

from megatron_eopt import checkpoints
from megatron_eopt.base.errors import ConfigurationError
from tests.harness import run_ranks
from tests.harness.scene import forget_megatron
from tests.unit.storage.full_state import unwrapped
from tests.unit.storage.runs import SHARED_EXPERTS, Run, global_name, global_values, make_chunk
from tests.unit.storage.runs import slab_of

MODEL = {**SHARED_EXPERTS, "layers": 1, "hidden": 24, "vocabulary": 40}
"""Slabs of gate and up, of queries, keys and values, and of the vocabulary all need padding."""

LAYOUTS: list[dict[str, int]] = [
    {},
    {"tp": 2},
    {"gtp": 2},
    {"gtp": 4, "expert_gtp": 2, "ep": 2},
    {"gtp": 2, "tp": 2, "expert_gtp": 2},
]


def saved(folder: str, models: list[dict[str, Any]]) -> None:
    """Save each model at each layout, without an optimizer."""
    for (number, model), (place, layout) in product(enumerate(models), enumerate(LAYOUTS)):
        chunk = make_chunk(Run(model=model, parallel=layout))
        path = Path(folder, f"{number}-{place}")
        path.mkdir(exist_ok=True)
        dist_checkpointing.save({"model": unwrapped(chunk).sharded_state_dict()}, str(path))
        forget_megatron()


def wrong(folder: str, models: list[dict[str, Any]]) -> list[Any]:
    """Load all of these at each layout; return the weights that are not those of their names."""
    found = []
    for (number, model), layout in product(enumerate(models), LAYOUTS):
        chunk = make_chunk(Run(model=model, parallel=layout))
        expected = {}
        for name, param in chunk.named_parameters():
            slab = slab_of(name, param, gated=True)
            expected[name] = slab.of(global_values(global_name(name, model), slab, param.shape, 0))
        for place, before in enumerate(LAYOUTS):
            for param in chunk.parameters():
                param.data.fill_(torch.nan)
            state = {"model": unwrapped(chunk).sharded_state_dict()}
            loaded = checkpoints.load(state, Path(folder, f"{number}-{place}"))
            unwrapped(chunk).load_state_dict(loaded["model"], strict=False)
            for name, param in chunk.named_parameters():
                if not torch.equal(param, expected[name].to(param.dtype)):
                    found.append((name, before, layout))
        forget_megatron()
    return found


MODELS = [MODEL, {**MODEL, "dtype": torch.bfloat16}]


def test_every_row_is_found_at_every_other_layout(tmp_path):
    run_ranks(4, saved, str(tmp_path), MODELS[:1], timeout=300)
    assert run_ranks(4, wrong, str(tmp_path), MODELS[:1], timeout=300) == [[]] * 4
