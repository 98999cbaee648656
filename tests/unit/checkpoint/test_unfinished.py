"""A process that is killed at any moment of a save leaves a complete checkpoint, or none."""

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.checkpoint.unfinished import (
    TRACKER,
    begin,
    complete_folder,
    finish,
    folder_name,
    mend_tracker,
    read_tracker,
)
from tests.harness import run_ranks
from tests.harness.long_results import record_faults

FILES = ("rank 0", "rank 1", "metadata")


class KilledError(BaseException):
    """Stands for the end of the process."""


@contextmanager
def killed_after(count: int) -> Iterator[None]:
    """Let the process end before the operation on files with this number, from 0 on."""
    left = itertools.count(count, -1)

    def counted(operation: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            if next(left) == 0:
                raise KilledError
            return operation(*args, **kwargs)

        return run

    names = ("rename", "rmdir", "unlink", "mkdir")
    operations = {name: counted(getattr(Path, name)) for name in names}
    operations["write_text"] = _empty_it_first(counted)
    with (
        mock.patch.multiple(Path, **operations),
        mock.patch.object(shutil, "rmtree", counted(_remove_a_part_first(counted))),
    ):
        yield


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
        if (folder / FILES[0]).exists():
            counted(Path.unlink)(folder / FILES[0])
        remove(folder, ignore_errors=True)

    return run


def save(folder: Path, content: str, files: tuple[str, ...] = FILES) -> None:
    """Save as the trainer does."""
    begin(folder)
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_text(content)
    folder.with_name(TRACKER).write_text(str(int(folder.name[5:])))
    finish(folder)


def loaded(folder: Path) -> str | None:
    """Return the content that a run would load; fails if it is not complete."""
    mend_tracker(folder.parent)
    found = complete_folder(folder)
    if found is None or not found.exists():
        return None
    assert {path.name for path in found.iterdir()} == {*FILES}
    (content,) = {path.read_text() for path in found.iterdir()}
    return content


@pytest.mark.parametrize("before", [(), ("old",), ("older", "old")], ids=len)
def test_a_kill_leaves_the_old_content_or_the_new_one(tmp_path, before):
    for count in range(100):
        folder = tmp_path / str(count) / "iter_0000002"
        for content in before:
            save(folder, content)
        try:
            with killed_after(count):
                save(folder, "new")
        except KilledError:
            assert loaded(folder) in {"old" if before else None, "new"}
            # killed again, at the same moment
            with pytest.raises(KilledError), killed_after(count):
                save(folder, "newer")
            assert loaded(folder) in {"old" if before else None, "new", "newer"}
            save(folder, "newest")
        else:
            assert count > len(FILES)
            break
        assert loaded(folder) == "newest"
        assert {path.name for path in folder.parent.iterdir()} == {folder.name, TRACKER}
    assert loaded(folder) == "new"


def test_the_tracker_names_a_complete_checkpoint_at_any_moment(tmp_path):
    contents = {"iter_0000001": "old", "iter_0000002": "new"}
    for count in range(100):
        run = tmp_path / str(count)
        save(run / "iter_0000001", "old")
        with contextlib.suppress(KilledError), killed_after(count):
            save(run / "iter_0000002", "new")
            break
        mend_tracker(run)
        named = run / folder_name(read_tracker(run / TRACKER))
        assert loaded(named) == contents[named.name]
    assert count > len(FILES)


def save_here(folder: Path) -> str:
    try:
        save(folder, "of another run")
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("before", [(), ("old",)], ids=len)
def test_another_run_cannot_save_the_same_iteration_meanwhile(tmp_path, before, record_property):
    folder = tmp_path / "iter_0000002"
    for content in before:
        save(folder, content)
    begin(folder)
    folder.mkdir()
    error = run_ranks(1, save_here, folder)[0]
    assert error.startswith(f"save='{tmp_path}': is a folder to which another process is saving")
    assert loaded(folder) == ("old" if before else None)
    # other iterations, and this one after a failed save of the same process
    assert not run_ranks(1, save_here, tmp_path / "iter_0000004")[0]
    save(folder, "new")
    assert loaded(folder) == "new"
    assert not run_ranks(1, save_here, folder)[0]
    outcome = {"the second one stopped on all ranks, nothing changed": 1}
    record_faults("two runs save the same iteration to one folder", outcome, record_property)


def test_files_of_more_ranks_are_not_mixed_with_new_ones(tmp_path):
    folder = tmp_path / "iter_0000002"
    save(folder, "of more ranks", (*FILES, "rank 2"))
    save(folder, "new")
    assert loaded(folder) == "new"


def test_a_linked_folder_keeps_its_files(tmp_path):
    save(tmp_path / "elsewhere" / "iter_0000002", "old")
    folder = tmp_path / "iter_0000002"
    folder.symlink_to(tmp_path / "elsewhere" / "iter_0000002")
    save(folder, "new")
    assert loaded(folder) == "new"
    assert loaded(tmp_path / "elsewhere" / "iter_0000002") == "old"


@pytest.mark.parametrize("text", ["", " \n", "-1", "3.0", "iter_0000002", "²", "releas"])
def test_a_tracker_names_an_iteration(tmp_path, text):
    tracker = tmp_path / TRACKER
    tracker.write_text(text)
    with pytest.raises(CheckpointError, match=TRACKER):
        read_tracker(tracker)
    for right in (7, "release"):
        tracker.write_text(f"{right}\n")
        assert read_tracker(tracker) == right
