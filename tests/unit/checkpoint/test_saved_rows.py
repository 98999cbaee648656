"""The model's weights load at any size of tensor parallelism and weight rematerialization."""

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from megatron_eopt import checkpoints
from tests.harness import run_ranks
from tests.harness.scene import forget_megatron
from tests.unit.storage.full_state import unwrapped
from tests.unit.storage.runs import (
    SHARED_EXPERTS,
    Run,
    global_name,
    global_values,
    make_chunk,
    slab_of,
)

MODEL = {**SHARED_EXPERTS, "layers": 1, "hidden": 24, "vocabulary": 40}
"""Slabs of gate and up, of queries, keys and values, and of the vocabulary all need padding."""

LAYOUTS: list[dict[str, int]] = [
    {},
    {"tp": 2},
    {"gtp": 2},
    {"gtp": 4, "expert_gtp": 2, "ep": 2},
    {"gtp": 2, "tp": 2, "expert_gtp": 2},
]


def saved(folder: str) -> None:
    """Save the model at each layout, without an optimizer."""
    for number, layout in enumerate(LAYOUTS):
        chunk = make_chunk(Run(model=MODEL, parallel=layout))
        path = Path(folder, str(number))
        path.mkdir(exist_ok=True)
        dist_checkpointing.save({"model": unwrapped(chunk).sharded_state_dict()}, str(path))
        forget_megatron()


def wrong(folder: str) -> list[Any]:
    """Load all of these at each layout; return the weights that are not those of their names."""
    found = []
    for layout in LAYOUTS:
        chunk = make_chunk(Run(model=MODEL, parallel=layout))
        for number, before in enumerate(LAYOUTS):
            for param in chunk.parameters():
                param.data.fill_(torch.nan)
            state = {"model": unwrapped(chunk).sharded_state_dict()}
            loaded = checkpoints.load(state, Path(folder, str(number)))
            unwrapped(chunk).load_state_dict(loaded["model"], strict=False)
            for name, param in chunk.named_parameters():
                slab = slab_of(name, param, gated=True)
                whole = global_values(global_name(name, MODEL), slab, param.shape, 0)
                if not torch.equal(param, slab.of(whole)):
                    found.append((name, before, layout))
        forget_megatron()
    return found


def test_every_row_is_found_at_every_other_layout(tmp_path):
    run_ranks(4, saved, str(tmp_path), timeout=300)
    assert run_ranks(4, wrong, str(tmp_path), timeout=300) == [[]] * 4
