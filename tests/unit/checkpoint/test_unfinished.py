"""A process that is killed at any moment of a save leaves a complete checkpoint, or none."""

import contextlib
import errno
import itertools
import os
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from megatron.training import async_utils, checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.checkpoint import saving
from megatron_eopt.guard import saves
from megatron_eopt.guard.contents import TRACKER, folder_name, read_tracker
from megatron_eopt.guard.files import check
from megatron_eopt.guard.saves import begin, replacing, whole
from tests.harness import run_ranks
from tests.harness.long_results import record_faults


class KilledError(BaseException):
    """Stands for the end of the process."""


@contextmanager
def calling_at(count: int, call: Callable[[], None]) -> Iterator[None]:
    """Call something before the operation on files with this number, from 0 on."""
    left = itertools.count(count, -1)

    def counted(operation: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            if next(left) == 0:
                call()
            return operation(*args, **kwargs)

        return run

    names = ("rename", "replace", "rmdir", "unlink", "mkdir")
    operations = {name: counted(getattr(Path, name)) for name in names}
    operations["write_text"] = _empty_it_first(counted)
    with (
        mock.patch.multiple(Path, **operations),
        mock.patch.object(shutil, "rmtree", counted(_remove_a_part_first(counted))),
        mock.patch.object(os, "link", counted(os.link)),
    ):
        yield


@contextmanager
def killed_after(count: int) -> Iterator[None]:
    """Let the process end before the operation on files with this number."""

    def die() -> None:
        raise KilledError

    try:
        with calling_at(count, die):
            yield
    except KilledError:
        # the system does this when the process has ended
        while saves._locks:
            os.close(saves._locks.popitem()[1])
        raise


def _empty_it_first(counted: Callable[..., Callable[..., object]]) -> Callable[..., object]:
    """Return what writes a file in two operations."""
    write = Path.write_text

    def run(path: Path, content: str) -> None:
        counted(write)(path, "")
        counted(write)(path, content)

    return run


def _remove_a_part_first(counted: Callable[..., Callable[..., object]]) -> Callable[..., object]:
    """Return what removes a folder in two operations, as a kill may find it."""
    remove = shutil.rmtree

    def run(folder: Path, **_: object) -> None:
        for path in sorted(folder.rglob("*.distcp"))[:1]:
            path.unlink()
        counted(remove)(folder, ignore_errors=True)

    return run


OLDER, OLD, NEW, NEWER, NEWEST = range(5)
OTHERS = {"tokenizer.json"}
"""What a user keeps in the folder."""


def write(folder: Path, content: int, files: int = 1) -> None:
    """Write a checkpoint, the tensors of several ranks if there are more files."""
    writer = dcp.FileSystemWriter(folder, thread_count=files)
    values = {f"weight{number}": torch.full((300,), float(content)) for number in range(files)}
    try:
        dcp.save(values, storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        raise KilledError from error


def save(folder: Path, content: int, files: int = 1) -> None:
    """Save as the trainer does."""
    unfinished = begin(folder)
    write(unfinished.path, content, files)
    unfinished.path.with_name(TRACKER).write_text(str(int(folder.name[5:])))
    unfinished.finish()


def read(folder: Path) -> int:
    values = {"weight0": torch.zeros(300)}
    dcp.load(values, checkpoint_id=folder, no_dist=True)
    (content,) = set(values["weight0"].tolist())
    return int(content)


def loaded(folder: Path) -> int | None:
    """Return the content that a run would load; fails if it is not complete."""
    found = whole(folder)
    if not found.exists():
        return None
    check(found)
    return read(found)


@pytest.mark.parametrize("before", [(), (OLD,), (OLDER, OLD)], ids=len)
def test_a_kill_leaves_the_old_content_or_the_new_one(tmp_path, before):
    for count in range(200):
        folder = tmp_path / str(count) / "iter_0000002"
        for content in before:
            save(folder, content)
        if before:
            (folder / "tokenizer.json").write_text("kept")
        try:
            with killed_after(count):
                save(folder, NEW)
        except KilledError:
            assert loaded(folder) in {OLD if before else None, NEW}
            # killed again, at the same moment
            with contextlib.suppress(KilledError), killed_after(count):
                save(folder, NEWER)
            assert loaded(folder) in {OLD if before else None, NEW, NEWER}
            save(folder, NEWEST)
        else:
            assert count > 10
            break
        assert loaded(folder) == NEWEST
        assert {path.name for path in folder.parent.iterdir()} == {folder.name, TRACKER}
        if before:
            assert (folder / "tokenizer.json").read_text() == "kept"
    assert loaded(folder) == NEW


def test_the_tracker_names_a_complete_checkpoint_at_any_moment(tmp_path):
    contents = {"iter_0000001": OLD, "iter_0000002": NEW}
    for count in range(200):
        run = tmp_path / str(count)
        save(run / "iter_0000001", OLD)
        with contextlib.suppress(KilledError), killed_after(count):
            save(run / "iter_0000002", NEW)
            break
        named = run / folder_name(read_tracker(run / TRACKER))
        assert loaded(named) == contents[named.name]
        # nothing stays of the killed save when the run has gone past it
        save(run / "iter_0000003", NEWER)
        assert not list(run.glob("unfinished.*"))
    assert count > 10


def save_here(folder: Path) -> str:
    try:
        save(folder, NEWER)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("before", [(), (OLD,)], ids=len)
def test_another_run_cannot_save_the_same_iteration_meanwhile(tmp_path, before, record_property):
    folder = tmp_path / "iter_0000002"
    for content in before:
        save(folder, content)
    begin(folder)
    errors = run_ranks(2, save_here, folder)
    assert errors[0] == errors[1]
    assert errors[0].startswith(
        f"save='{tmp_path}': is a folder to which another process is saving"
    )
    assert loaded(folder) == (OLD if before else None)
    # other iterations, and this one after a failed save of the same process
    assert not run_ranks(1, save_here, tmp_path / "iter_0000004")[0]
    save(folder, NEW)
    assert loaded(folder) == NEW
    assert not run_ranks(1, save_here, folder)[0]
    outcome = {"the second one stopped on all ranks, nothing changed": 1}
    record_faults("two runs save the same iteration to one folder", outcome, record_property)


def test_files_of_more_ranks_are_not_mixed_with_new_ones(tmp_path):
    folder = tmp_path / "iter_0000002"
    save(folder, OLD, files=3)
    assert len(list(folder.glob("*.distcp"))) == 3
    save(folder, NEW)
    assert loaded(folder) == NEW
    assert len(list(folder.glob("*.distcp"))) == 1


def test_what_cannot_be_deleted_fails_no_save(tmp_path, monkeypatch):
    save(folder := tmp_path / "iter_0000002", OLD)
    monkeypatch.setattr(os, "rmdir", mock.Mock(side_effect=OSError(errno.EBUSY, "busy")))
    save(folder, NEW)
    assert loaded(folder) == NEW


@pytest.mark.parametrize("exists", [True, False])
def test_what_a_link_leads_to_is_replaced(tmp_path, exists):
    """It may be on another disk, where there is space."""
    elsewhere, folder = tmp_path / "elsewhere" / "iter_0000002", tmp_path / "iter_0000002"
    folder.symlink_to(Path("elsewhere") / "iter_0000002")
    if exists:
        save(elsewhere, OLD)
    save(folder, NEW)
    assert folder.is_symlink()
    assert loaded(folder) == loaded(elsewhere) == NEW
    assert {path.name for path in elsewhere.parent.iterdir()} == {elsewhere.name, TRACKER}


def test_what_a_killed_save_of_an_earlier_release_has_set_aside_is_loaded_and_mended(tmp_path):
    """It renamed a folder to ``previous.iter_...`` before it wrote a new one, or made it empty."""
    for number in (2, 4):
        save(tmp_path / f"iter_{number:07d}", OLD)
    folder, first = tmp_path / "iter_0000002", tmp_path / "previous.iter_0000006"
    folder.rename(tmp_path / "previous.iter_0000002")
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"half")
    first.mkdir()
    assert loaded(folder) == OLD
    save(tmp_path / "iter_0000008", NEW)
    assert loaded(folder) == OLD
    assert not list(tmp_path.glob("previous.*"))


def half(folder: Path) -> None:
    folder.joinpath("__0_0.distcp").write_bytes(b"half")


def unrelated(folder: Path) -> None:
    write(folder, NEW)
    raise ValueError("of the loop")


def test_a_save_that_is_not_done_is_not_put_in_place(tmp_path):
    """As with torch's ``async_save``, whose result nobody waited for."""
    folder = tmp_path / "run"
    with replacing(folder) as path:
        write(path, OLD)
    for write_some, error in ((half, CheckpointError), (unrelated, ValueError)):
        words = r"is no complete checkpoint|of the loop"
        with pytest.raises(error, match=words), replacing(folder) as path:
            write_some(path)
    assert loaded(folder) == OLD
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_wandb_is_told_of_a_checkpoint_when_it_is_in_its_folder(tmp_path):
    told = []

    def tell(folder: str, tracker: str, *rest: object) -> None:
        assert loaded(Path(folder)) == NEW
        told.append((folder, Path(tracker).read_text(), *rest))

    folder, tell = tmp_path / "iter_0000002", saving.when_it_is_in_place(tell)
    unfinished = begin(folder)
    (tmp_path / TRACKER).write_text("1")
    with saving._during(unfinished):
        write(unfinished.path, NEW)
        # the trainer reads it, to delete the iteration before
        assert unfinished.path.with_name(TRACKER).read_text() == "1"
        unfinished.path.with_name(TRACKER).write_text("2")
        tell(str(unfinished.path), str(unfinished.path.with_name(TRACKER)), "save_dir", 2)
    assert not told
    unfinished.finish()
    assert told == [(str(folder), "2", "save_dir", 2)]
    tell(str(folder), str(tmp_path / TRACKER), "save_dir", 2)
    assert told == told[:1] * 2


def run_of(monkeypatch: pytest.MonkeyPatch, folder: Path, **more: object) -> None:
    """Let the trainer have arguments."""
    names = ("non_persistent_ckpt_type", "non_persistent_global_ckpt_dir")
    args = Namespace(save=str(folder), **(dict.fromkeys(names) | more))
    monkeypatch.setattr(checkpointing, "get_args", lambda: args)


def test_an_asynchronous_save_replaces_the_folder_when_it_is_written(tmp_path, monkeypatch):
    """Its last steps are the request's; the trainer takes them when all ranks have written."""
    run_of(monkeypatch, tmp_path)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 1)
    scheduled: list[Any] = []
    schedule = saving.finishing_later(scheduled.append)

    def finalize(blocking: bool) -> None:
        assert blocking
        for step in scheduled.pop().finalize_fns:
            step()

    monkeypatch.setattr(async_utils, "maybe_finalize_async_save", finalize)

    @saving.replacing_a_folder
    def save_checkpoint(
        iteration: int, content: int, non_persistent_ckpt: bool = False, release: bool = False
    ) -> str:
        place = Path(saving.written_to(str(folder)))
        assert saving.written_to(str(tmp_path)) == str(tmp_path)
        named = saving.with_a_copy_of_the_tracker(lambda path: f"{path}/{TRACKER}")
        assert named(str(tmp_path)) == str(place.with_name(TRACKER))
        assert named("/elsewhere") == f"/elsewhere/{TRACKER}"
        write(place, content)
        other = SimpleNamespace(finalize_fns=[])
        schedule(other)
        assert scheduled.pop() is other
        assert not other.finalize_fns
        name = place.with_name(TRACKER)
        steps = [lambda: None, lambda: name.write_text(str(iteration))]
        schedule(SimpleNamespace(finalize_fns=steps))
        return "saved"

    folder = tmp_path / "iter_0000002"
    assert save_checkpoint(2, OLD) == "saved"
    assert loaded(folder) is None
    # the one before it is finished first
    save_checkpoint(2, NEW)
    assert loaded(folder) == OLD
    finalize(blocking=True)
    assert loaded(folder) == NEW
    assert (tmp_path / TRACKER).read_text() == "2"
    assert {path.name for path in tmp_path.iterdir()} == {folder.name, TRACKER}
    # local checkpoints have a manager of their own
    run_of(monkeypatch, tmp_path, non_persistent_ckpt_type="local")
    assert save_checkpoint(3, OLDER, non_persistent_ckpt=True) == "saved"
    assert loaded(folder) == OLDER
    request = SimpleNamespace(finalize_fns=[print])
    schedule(request)
    assert request.finalize_fns == [print]


KIND, ELSEWHERE = "non_persistent_ckpt_type", {"non_persistent_global_ckpt_dir": "/other"}


@pytest.mark.parametrize(
    ("fields", "non_persistent", "remote", "expected"),
    [
        ({}, False, False, "run/iter_0000007"),
        ({KIND: "local"}, False, False, "run/iter_0000007"),
        ({KIND: "local"}, True, False, None),
        ({KIND: "global"}, True, False, "run/non_persistent/iter_0000007"),
        ({KIND: "global", **ELSEWHERE}, True, False, "/other/iter_0000007"),
        ({}, False, True, None),
    ],
)
def test_the_folder_of_each_kind_of_save(
    tmp_path, monkeypatch, fields, non_persistent, remote, expected
):
    run_of(monkeypatch, tmp_path / "run", **fields)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(saving.MultiStorageClientFeature, "is_enabled", lambda: remote)
    asked = {"non_persistent_ckpt": non_persistent, "iteration": 7, "release": False}
    assert saving._folder_of(asked) == (tmp_path / expected if expected else None)


@pytest.mark.parametrize("text", ["", " \n", "-1", "3.0", "iter_0000002", "²", "٣", "releas"])
def test_a_tracker_names_an_iteration(tmp_path, text):
    tracker = tmp_path / TRACKER
    tracker.write_text(text)
    with pytest.raises(CheckpointError, match=TRACKER):
        read_tracker(tracker)
    for right, name in ((7, "iter_0000007"), ("release", "release")):
        tracker.write_text(f"{right}\n")
        assert read_tracker(tracker) == right
        assert folder_name(right) == name


def test_an_error_of_the_block_is_collected_only_if_asked_for():
    error = ValueError("of the block")
    with saves.collecting_errors(of_the_block=True) as errors:
        raise error
    with pytest.raises(ValueError, match="of the block"), saves.collecting_errors():
        raise error
    assert errors == [error]


@pytest.mark.parametrize(
    ("error", "cause", "kind"),
    [
        (ValueError(), OSError(errno.ENOSPC, "full"), CheckpointError),
        (ValueError("x"), None, ValueError),
        (CheckpointException("x", {}), OSError(errno.EIO, "broken"), RuntimeError),
    ],
)
def test_a_full_disk_is_named_whatever_error_hides_it(tmp_path, error, cause, kind):
    def fail() -> None:
        raise error from cause

    words = "no space left.*What the folder had before is unchanged" if error.args == () else "x"
    with pytest.raises(kind, match=words):
        saves.naming_full_disk(tmp_path / "run", fail)
