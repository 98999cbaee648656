"""``kill -9`` at each operation of a save in an own loop leaves the old checkpoint or the new one.

The loops are that of ``examples/fsdp2_pretrain.py``, with torch's own checkpoints, and one with
``checkpoints.save``. Disks are real and small ones, so only an administrator can run those tests.
"""

import itertools
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_eopt import EmergingOptimizerConfig, checkpoints
from megatron_eopt.fsdp2 import build_optimizer
from tests.functional.test_other_trainers import example
from tests.harness import RankError, run_ranks
from tests.harness.long_results import record_faults

OLD, NEW, LAST = 1, 2, 3
WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


class Fsdp2:
    """The loop of the example."""

    def __init__(self) -> None:
        self.example = example("fsdp2_pretrain")
        torch.manual_seed(1)
        self.model = self.example.GPT(1, 16, 2, 8)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
        config = EmergingOptimizerConfig(optimizer="muon", lr=0.01)
        self.optimizer = build_optimizer(self.model, config)
        self.model(torch.arange(16).view(2, 8)).square().mean().backward()
        self.optimizer.step()

    def _tensors(self) -> Iterator[torch.Tensor]:
        states = [state.values() for state in self.optimizer.state.values()]
        for value in (*self.model.parameters(), *itertools.chain(*states)):
            if isinstance(value, torch.Tensor) and value.dim():
                yield value.to_local() if hasattr(value, "to_local") else value

    def save(self, folder: Path, content: int) -> None:
        with torch.no_grad():
            for tensor in self._tensors():
                tensor.fill_(content)
        self.example.save(self.model, self.optimizer, 7, folder)

    def load(self, folder: Path) -> set[float]:
        with torch.no_grad():
            for tensor in self._tensors():
                tensor.fill_(-1)
        assert self.example.load(self.model, self.optimizer, folder) == 7
        return {x for tensor in self._tensors() for x in tensor.unique().tolist()}


class Megatron:
    """A loop with megatron-core's format."""

    def _state(self, content: int) -> dict[str, Any]:
        place = (0, distributed.get_rank(), distributed.get_world_size())
        return {
            name: ShardedTensor.from_rank_offsets(name, torch.full((2000,), float(content)), place)
            for name in ("weight0", "weight1", "weight2")
        }

    def save(self, folder: Path, content: int) -> None:
        checkpoints.save(self._state(content), folder)

    def load(self, folder: Path) -> set[float]:
        loaded = checkpoints.load(self._state(-1), folder)
        return {x for weight in loaded.values() for x in weight.unique().tolist()}


LOOPS: dict[str, Callable[[], Fsdp2 | Megatron]] = {"fsdp2": Fsdp2, "megatron": Megatron}


def save(name: str, folder: Path, content: int) -> None:
    folder.mkdir(exist_ok=True)
    LOOPS[name]().save(folder, content)


def save_and_die(name: str, folder: Path, victim: int, count: int) -> None:
    """Save; the victim is killed before its operation with this number, from 0 on."""
    loop, left = LOOPS[name](), itertools.count(count, -1)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        is_write = event in WRITES or (event == "open" and set("wax+") & set(str(args[1])))
        if is_write and str(args[0]).startswith(str(folder.parent)) and next(left) == 0:
            # what the other rank does meanwhile is done
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)

    if distributed.get_rank() == victim:
        sys.addaudithook(hook)
    loop.save(folder, NEW)


def load_and_go_on(name: str, folder: Path) -> tuple[set[float], set[float], list[str]]:
    loop = LOOPS[name]()
    found = loop.load(folder)
    folder.mkdir(exist_ok=True)
    distributed.barrier()
    loop.save(folder, LAST)
    return found, loop.load(folder), sorted(path.name for path in folder.parent.iterdir())


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("name", LOOPS)
def test_a_kill_leaves_the_old_checkpoint_or_the_new_one(tmp_path, name, victim, record_property):
    start, cpu = tmp_path / "start", name == "megatron"
    start.mkdir()
    run_ranks(2, save, name, start / "model", OLD, cpu=cpu)
    found = []
    for count in range(100):
        run = tmp_path / str(count)
        shutil.copytree(start, run)
        folder = run / "model"
        try:
            run_ranks(2, save_and_die, name, folder, victim, count, cpu=cpu, timeout=120)
        except RankError:
            (first, last, names), other = run_ranks(2, load_and_go_on, name, folder, cpu=cpu)
            assert (first, last, names) == other
            assert (last, names) == ({LAST}, ["model"])
            assert first in ({OLD}, {NEW}), (count, first)
            found.append(first)
        else:
            break
    assert found[0] == {OLD}
    assert len(found) > (8 if victim == 0 else 0)
    outcome = {"the old checkpoint or the new one is loaded": len(found)}
    title = f"kill of rank {victim} in a save over a checkpoint: {name}"
    record_faults(title, outcome, record_property)
