"""Checkpoints are data: a file that would call something is refused, and nothing is called."""

import argparse
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_eopt import megatron_lm
from megatron_eopt.megatron_lm.optional import FLAGS
from tests.harness import RankError, run_ranks


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def state(content: Any) -> dict[str, Any]:
    # what a trainer saves: weights, random states with numpy arrays in them, plain values
    rng = {"numpy": np.random.RandomState(1).get_state(), "torch": torch.arange(3)}
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", torch.arange(6.0), replica_id=0),
        "rng": ShardedObject("rng", [rng], (1,), (0,)),
        "object": ShardedObject("object", content, (1,), (0,)),
        "iteration": 7,
        "args": {"lr": 0.1},
    }


def save(folder: Path, content: Any = "fine", common: Any = None) -> None:
    folder.mkdir()
    saved = state(content)
    if common is not None:
        saved["common"] = common
    dist_checkpointing.save(saved, folder)


def load(folder: Path) -> dict[str, Any]:
    with megatron_lm.installed():
        FLAGS.follow(argparse.Namespace(verify_checkpoints=True))
        wanted = state("to be read")
        wanted["weight"].data = torch.zeros(6)
        loaded: dict[str, Any] = dist_checkpointing.load(wanted, folder)
    return loaded


def round_trip(folder: Path) -> dict[str, Any]:
    save(folder / "a", {"nested": [1, torch.ones(2), "three"]})
    return load(folder / "a")


def test_what_a_trainer_saves_comes_back(tmp_path):
    (loaded,) = run_ranks(1, round_trip, tmp_path)
    assert torch.equal(loaded["weight"], torch.arange(6.0))
    assert loaded["iteration"] == 7
    assert loaded["args"] == {"lr": 0.1}
    assert torch.equal(loaded["object"]["nested"][1], torch.ones(2))
    assert np.array_equal(loaded["rng"][0]["numpy"][1], np.random.RandomState(1).get_state()[1])


def tampered(folder: Path, where: str) -> None:
    mark, checkpoint = folder / "called", folder / "checkpoint"
    if where == "a sharded object":
        save(checkpoint, Evil(mark))
    elif where == "the common state":
        save(checkpoint, common=Evil(mark))
    else:
        save(checkpoint)
        if where == "the metadata":
            (checkpoint / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
        else:
            torch.save({"iteration": Evil(mark)}, checkpoint / "common.pt")
    assert not mark.exists()
    load(checkpoint)


PLACES = {
    "a sharded object": "the object 'object/shard_0_1' of .* was not loaded",
    "the common state": "the object 'common_state/shard_0_1' of .* was not loaded",
    "the metadata": r"metadata was not loaded: it names pathlib\.Path\.touch",
    "an old file of the common state": "Weights only load failed",
}


@pytest.mark.parametrize("where", PLACES)
def test_a_file_that_would_call_something_is_refused(where, tmp_path):
    with pytest.raises(RankError, match=PLACES[where]):
        run_ranks(1, tampered, tmp_path, where)
    assert not (tmp_path / "called").exists()
