"""What lies beside a kill: other jobs, folders that are not plain, and ranks that fail alone."""

import contextlib
import errno
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedTensor, serialization
from torch import distributed

from megatron_eopt import checkpoints
from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.guard import saves
from megatron_eopt.guard.saves import begin, replacing
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.endings import errors_of
from tests.unit.checkpoint import test_unfinished
from tests.unit.checkpoint.test_unfinished import NEW, NEWER, OLD, calling_at, loaded, read, write


def save(folder: Path, content: int, files: int = 1) -> None:
    unfinished = begin(folder)
    write(unfinished.path, content, files)
    unfinished.finish()


def test_a_load_beside_every_event_of_another_jobs_save(tmp_path):
    """One rank reads before the save, another at one of its events."""
    outcomes = set()
    for count in range(100):
        folder = tmp_path / str(count) / "run"
        save(folder, OLD)
        place = checkpoints.checked(folder)
        values, error = [read(place)], None

        def slow_rank(values=values, place=place) -> None:
            with place:
                values.append(read(place))

        try:
            with calling_at(count, slow_rank):
                save(folder, NEW)
        except Exception as raised:
            error = raised
        if values == [OLD] and error is None:
            break
        # whoever reads both says so
        assert isinstance(error, CheckpointError) or values == [OLD, OLD], (count, values, error)
        outcomes.add(error is None)
    assert count > 8
    assert True in outcomes


@on_ranks(1)
def test_a_load_of_megatrons_format_beside_another_save(tmp_path):
    folder = tmp_path / "run"

    def state(value: float) -> dict[str, ShardedTensor]:
        return {"w": ShardedTensor.from_rank_offsets("w", torch.full((8,), value))}

    folder.mkdir()
    checkpoints.save(state(1.0), folder)
    original = serialization.load

    def slow(*args: object, **kwargs: object) -> object:
        checkpoints.save(state(2.0), folder)
        return original(*args, **kwargs)

    with (
        mock.patch.object(serialization, "load", slow),
        pytest.raises(CheckpointError, match="was replaced by another save while it was read"),
    ):
        checkpoints.load(state(0.0), folder)
    assert checkpoints.load(state(0.0), folder)["w"].eq(2.0).all()


@pytest.mark.parametrize("write_one", [write, save])
def test_without_a_list_too_other_files_tell_saves_apart(tmp_path, write_one):
    write_one(tmp_path / "run", OLD)
    with (
        pytest.raises(CheckpointError, match="was replaced by another save"),
        checkpoints.checked(tmp_path / "run"),
    ):
        write_one(tmp_path / "run", NEW)
    with checkpoints.checked(tmp_path / "run") as place:
        assert read(place) == NEW
    with pytest.raises(ValueError, match="of the loop"), checkpoints.checked(tmp_path / "run"):
        raise ValueError("of the loop")


# One rank fails


def fails(folder: Path, failing: int, *, has_saved: bool) -> None:
    with replacing(folder) as path:
        if has_saved:
            dcp.save({"w": torch.ones(8)}, checkpoint_id=path)
        if distributed.get_rank() == failing:
            raise ValueError("of the loop")
        if not has_saved:
            dcp.save({"w": torch.ones(8)}, checkpoint_id=path)


@pytest.mark.parametrize(("rank", "has_saved"), [(0, False), (1, False), (1, True)])
def test_a_rank_that_fails_is_named_by_all_and_ends_them(tmp_path, rank, has_saved):
    """Long before the time-out of their group, which is 30 minutes."""
    folder = tmp_path / "run"
    save(folder, OLD)
    failing = partial(fails, has_saved=has_saved)
    errors = errors_of(failing, folder, rank, limit_s=60, cpu=False)
    assert errors[rank].endswith("ValueError: of the loop\n")
    assert f"RuntimeError: rank {rank} failed: ValueError: of the loop" in errors[1 - rank]
    assert loaded(folder) == OLD
    assert not has_saved or {path.name for path in tmp_path.iterdir()} == {"run"}


# Folders that are not plain


def test_where_files_cannot_be_locked_other_jobs_are_left_alone(tmp_path):
    other = begin(tmp_path / "a")
    write(other.path, OLD)
    saves._locks.clear()  # as in another process
    failing = OSError(errno.ENOLCK, "no locks")
    with mock.patch.object(saves.fcntl, "lockf", side_effect=failing):
        save(tmp_path / "b", NEW)
    assert other.path.is_dir()
    assert read(other.path) == OLD
    # where there are locks, the job has ended
    save(tmp_path / "b", NEW)
    assert not other.path.exists()


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[None]:
    """Let a folder be a mount point, which cannot be renamed."""
    original = os.path.ismount
    with mock.patch("os.path.ismount", lambda path: Path(path) == folder or original(path)):
        yield


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_kill_leaves_no_mixture_on_a_mount_point(tmp_path, is_listed, caplog):
    for count in range(100):
        folder = tmp_path / str(count)
        if is_listed:
            save(folder, OLD, files=2)
        else:
            write(folder, OLD, files=2)
        try:
            with mounted(folder), test_unfinished.killed_after(count):
                save_there(folder)
        except test_unfinished.KilledError:
            with contextlib.suppress(CheckpointError):
                assert loaded(folder) in (OLD, NEW)
        else:
            break
    assert count > 3
    assert loaded(folder) == NEW
    assert "cannot be renamed" in caplog.text


def save_there(folder: Path) -> None:
    unfinished = begin(folder)
    assert unfinished.is_in_place
    # of two ranks' files, a kill here leaves one
    (folder / "__0_0.distcp").unlink()
    write(unfinished.path, NEW)
    unfinished.finish()


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_kill_between_two_files_on_a_mount_point(tmp_path, is_listed):
    folder, other = tmp_path / "run", tmp_path / "other"
    (save if is_listed else write)(folder, OLD, files=2)
    write(other, NEW, files=2)
    with mounted(folder):
        begin(folder)
    saves._locks.clear()  # the process has ended
    (other / "__0_0.distcp").replace(folder / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="is no complete checkpoint"):
        checkpoints.checked(folder)


def second(folder: Path) -> None:
    with mounted(folder), pytest.raises(CheckpointError, match="another process is saving"):
        begin(folder)


def test_a_mount_point_is_locked_too(tmp_path):
    folder = tmp_path / "run"
    save(folder, OLD)
    with mounted(folder):
        first = begin(folder)
        run_ranks(1, second, folder)
        write(folder, NEW)
        first.finish()
    assert loaded(folder) == NEW
    with mounted(folder):
        save(folder, NEWER)


def test_a_log_that_is_open_stays_in_the_folder(tmp_path):
    folder = tmp_path / "run"
    save(folder, OLD)
    (folder / "logs").mkdir()
    with (folder / "log.txt").open("w") as log, (folder / "logs" / "0.txt").open("w") as other:
        for content in (NEW, NEWER):
            log.write(f"{content}\n")
            log.flush()
            save(folder, content)
        other.write("in a folder")
    assert (folder / "log.txt").read_text() == f"{NEW}\n{NEWER}\n"
    assert (folder / "logs" / "0.txt").read_text() == "in a folder"
    links = {folder / "link": "log.txt", folder / "links": "logs"}
    for link, target in links.items():
        link.symlink_to(target)
    with mock.patch("os.link", side_effect=OSError(errno.EPERM, "no links")):
        save(folder, OLD)
    assert all(link.is_symlink() for link in links)
    assert (folder / "log.txt").read_text() == f"{NEW}\n{NEWER}\n"


def test_files_that_rank_0_does_not_see_are_named(tmp_path):
    save(tmp_path / "run", OLD)
    save_of_two = begin(tmp_path / "run")
    write(save_of_two.path, NEW, files=2)
    # as on another node's own disk
    (save_of_two.path / "__0_1.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_1.*not there for rank 0.*that all nodes see"):
        save_of_two.finish()
    assert loaded(tmp_path / "run") == OLD


def test_folders_that_no_save_can_replace_are_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "in" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "in" / "here")
    for folder, message in {
        ".": "is the working folder of this process or above it",
        "..": "is the working folder of this process or above it",
        tmp_path / "file": "is a file, not a folder",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            begin(folder)
    assert (tmp_path / "file").read_text() == "mine"
    save(Path("mine"), NEW)
    assert loaded(Path("mine")) == NEW


def begin_as_nobody(folder: Path) -> None:
    os.setegid(65534)
    os.seteuid(65534)
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written\. Change its mode"):
            begin(folder)
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which needs root")
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    folder = tmp_path / "run"
    save(folder, OLD)
    for path in (tmp_path, *tmp_path.parents[:-2]):
        path.chmod(0o777)
    folder.chmod(0o555)
    run_ranks(1, begin_as_nobody, folder)
    assert loaded(folder) == OLD
