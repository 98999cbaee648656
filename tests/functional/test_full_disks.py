"""A full disk in a save is named on all ranks, and the old checkpoint stays.

The disk is real: a file system in memory, which only an administrator can mount.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import distributed

from megatron_eopt import checkpoints
from tests.functional.long.test_kills_in_own_loops import LAST, LOOPS, NEW, OLD
from tests.functional.script import losses, train
from tests.harness import RankError, run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.tiers import mostly_long

PAGE = 4096
FULL = "cannot be saved, because its disk has no space"


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only an administrator can mount a disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, free: int) -> None:
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while file.write(b"0" * PAGE):
            pass
    os.truncate(disk / "filler", max(0, (disk / "filler").stat().st_size - free))


def saves(name: str, disk: Path, every: int) -> list[tuple[int, str, set[float]]]:
    """Save with more and more free space; return the space, the error and what loads then."""
    loop, folder, found = LOOPS[name](), disk / "model", []
    folder.mkdir(exist_ok=True)
    loop.save(folder, OLD)
    for free in range(0, 600_000, every * PAGE):
        if distributed.get_rank() == 0:
            fill(disk, free)
        distributed.barrier()
        error = ""
        try:
            loop.save(folder, NEW)
        except checkpoints.CheckpointError as caught:
            error = str(caught)
        distributed.barrier()
        if distributed.get_rank() == 0:
            (disk / "filler").unlink()
        found.append((free, error, loop.load(folder)))
        if not error:
            break
    loop.save(folder, LAST)
    return [*found, (0, "", loop.load(folder))]


@pytest.mark.parametrize("every", mostly_long([1, 4], 4))
@pytest.mark.parametrize("name", LOOPS)
def test_it_is_named_on_all_ranks(disk, name, every):
    first, second = run_ranks(2, saves, name, disk, every, cpu=name == "megatron", timeout=300)
    assert first == second
    *failed, done, last = first
    assert len(failed) * every > 10
    for free, error, loaded in failed:
        assert error.startswith(f"save='{disk}/model': {FULL}")
        assert loaded == {OLD}, free
    assert (done[2], last[2]) == ({NEW}, {LAST})


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_the_trainer_names_it(disk, form):
    run = ["--optimizer", "muon", "--ckpt-format", form, "--save-interval", "2"]
    run += ["--save", str(disk), "--load", str(disk), "--override-opt_param-scheduler"]
    train(*run, "--train-iters", "2", timeout=300)
    fill(disk, 2 * PAGE)
    with pytest.raises(RankError, match=FULL):
        train(*run, "--train-iters", "4")
    (disk / "filler").unlink()
    output = train(*run, "--train-iters", "4", timeout=300)
    assert "successfully loaded checkpoint" in output
    assert len(losses(output)) == 2
    assert (disk / "latest_checkpointed_iteration.txt").read_text() == "4"


@on_ranks(2)
def test_a_missing_folder_is_named_on_all_ranks(tmp_path):
    with pytest.raises(checkpoints.CheckpointError) as error:
        LOOPS["megatron"]().save(tmp_path / "missing", NEW)
    # a loop goes on
    distributed.barrier()
    assert str(error.value).startswith(f"save='{tmp_path}/missing': does not exist"), error.value
