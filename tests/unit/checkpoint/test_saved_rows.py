"""The model's weights load at any size of tensor parallelism and weight rematerialization."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory

from megatron_eopt import checkpoints
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
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


def saved(layouts: list[dict[str, int]], folder: str) -> None:
    """Save the model at each layout, without an optimizer."""
    for number, layout in enumerate(layouts):
        chunk = make_chunk(Run(model=MODEL, parallel=layout))
        path = Path(folder, str(number))
        path.mkdir(exist_ok=True)
        dist_checkpointing.save({"model": unwrapped(chunk).sharded_state_dict()}, str(path))
        forget_megatron()


def wrong(layouts: list[dict[str, int]], folder: str) -> list[Any]:
    """Load all of these at each layout; return the weights that are not those of their names."""
    found = []
    for layout in layouts:
        chunk = make_chunk(Run(model=MODEL, parallel=layout))
        for number, before in enumerate(layouts):
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


@pytest.mark.parametrize(
    "layouts",
    [LAYOUTS[2:4], pytest.param(LAYOUTS, marks=pytest.mark.long)],
    ids=["two", "all"],
)
def test_every_row_is_found_at_every_other_layout(tmp_path, layouts):
    run_ranks(4, saved, layouts, str(tmp_path), timeout=300)
    assert run_ranks(4, wrong, layouts, str(tmp_path), timeout=300) == [[]] * 4


WHOLE = torch.arange(512.0).view(64, 8)


def uncut(key: str, values: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, values.clone(), replica_id=(0, 0, dist.get_rank()))


def in_sections(key: str, sections: int, size: int) -> ShardedTensorFactory:
    """Return an entry as that of gate and up: the rows of each section are cut."""
    copy, rank = divmod(dist.get_rank(), size)
    data = torch.cat([section.chunk(size)[rank] for section in WHOLE.chunk(sections)])

    def build(key: str, data: torch.Tensor, replica: Any, _: Any) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(
                key, part, (0, number * size + rank, sections * size), replica_id=replica
            )
            for number, part in enumerate(data.chunk(sections))
        ]

    return ShardedTensorFactory(key, data, build, torch.cat, (0, 0, copy))


def transposed(key: str, size: int) -> ShardedTensorFactory:
    copy, rank = divmod(dist.get_rank(), size)

    def build(key: str, data: torch.Tensor, replica: Any, _: Any) -> ShardedTensor:
        part = data.T.contiguous()
        return ShardedTensor.from_rank_offsets(key, part, (0, rank, size), replica_id=replica)

    data = WHOLE.T.chunk(size, 1)[rank].contiguous()
    return ShardedTensorFactory(key, data, build, lambda part: part.T.contiguous(), (0, 0, copy))


def of_object(key: str) -> ShardedTensorFactory:
    def build(key: str, data: torch.Tensor, replica: Any, _: Any) -> ShardedObject:
        return ShardedObject(key, data, (1,), (0,), replica_id=replica)

    replica = (0, 0, dist.get_rank())
    return ShardedTensorFactory(key, WHOLE.clone(), build, lambda loaded: loaded, replica)


OTHERS: dict[str, Any] = {
    "gate and up alone": lambda size: in_sections("linear_fc1.adapter.weight", 2, size),
    "more pieces than ranks of TP": lambda size: {
        "fc1": in_sections("mlp.linear_fc1.weight", 2, size),
        "fc2": uncut("mlp.linear_fc2.weight", WHOLE),
    },
    "queries, keys, values and gates": lambda size: in_sections("linear_qkv.weight", 4, size),
    "transposed": lambda size: transposed("weight1", size),
    "an object": lambda size: of_object("table"),
    "a scalar": lambda size: uncut("layernorm.scale", torch.tensor(2.0)),
}
"""Entries of models without weight rematerialization, by the number of parts of rows."""


def read_otherwise(folder: str) -> list[Any]:
    """Return which entries are not read as megatron-core reads them."""
    initialize_megatron()
    found = []
    for kind, entry in OTHERS.items():
        for before in (1, 2):
            path = Path(folder, f"{kind} {before}")
            path.mkdir(exist_ok=True)
            dist_checkpointing.save({"model": {"entry": entry(before)}}, str(path))
            for now in (1, 2):
                loads = (dist_checkpointing.load, checkpoints.load)
                try:
                    expected, its = (load({"model": {"entry": entry(now)}}, path) for load in loads)
                    torch.testing.assert_close(its, expected, rtol=0, atol=0)
                except (AssertionError, RuntimeError) as error:
                    found.append((kind, before, now, str(error)))
    forget_megatron()
    return found


def test_without_rematerialization_rows_are_read_as_megatron_core_reads_them(tmp_path):
    assert run_ranks(2, read_otherwise, str(tmp_path), timeout=120) == [[]] * 2
