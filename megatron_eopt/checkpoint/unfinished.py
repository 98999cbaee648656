"""Which folder has the complete checkpoint of an iteration, also after a save was killed.

While the trainer writes ``iter_0000010``, the folder ``previous.iter_0000010`` beside it holds what
was there before, and is empty if nothing was. When all files are written, one renaming ends this
state. All folders are local or shared file systems, since remote storage cannot rename.

Meanwhile, ``previous.iter_0000010`` is locked, so that no other run writes into the same files. The
system removes the lock when the process ends.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import uuid
from pathlib import Path
from typing import Literal

from megatron_eopt.base.agreement import CheckpointError

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's file with the iteration to load, which is written after the checkpoint."""

_PREVIOUS, _OBSOLETE = "previous.", "obsolete."

_locks: dict[Path, int] = {}
"""Open handles of folders that this process has locked."""


def complete_folder(folder: Path) -> Path | None:
    """Return the folder with the complete content of an iteration; None if there is none.

    This is ``folder`` itself, unless a save to it has not finished.
    """
    previous = _previous_of(folder)
    try:
        holds_content = any(previous.iterdir())
    except FileNotFoundError:
        return folder
    if holds_content:
        return previous
    # the trainer writes the tracker when all files are written
    return folder if _is_tracked(folder) else None


def begin(folder: Path) -> None:
    """Set the content of an iteration aside before it is saved anew; for one rank.

    Raises:
        CheckpointError: If another process saves this iteration to this folder now.
    """
    mend_tracker(folder.parent)
    previous = _previous_of(folder)
    _lock(previous)
    # there is a complete checkpoint, which runs load until the new save has ended
    if complete_folder(folder) == folder and os.path.lexists(folder):
        with contextlib.suppress(FileNotFoundError):
            # left by a save that was killed after the tracker was written
            previous.rmdir()
        # renaming is atomic: a kill leaves either the old state or this one
        folder.rename(previous)
    else:
        # files of an unfinished save, perhaps of more ranks
        _remove(folder)
        previous.mkdir(parents=True, exist_ok=True)
    _lock(previous)


def finish(folder: Path) -> None:
    """Make a saved iteration the one that is loaded; for one rank, when all ranks have saved."""
    # removing a folder takes time, and a kill would leave a part of it
    _previous_of(folder).rename(folder.with_name(f"{_OBSOLETE}{uuid.uuid4().hex}"))
    for obsolete in folder.parent.glob(f"{_OBSOLETE}*"):
        _remove(obsolete)
    _unlock(_previous_of(folder))


def mend_tracker(run: Path) -> None:
    """Fill in a tracker file that its writer has left empty, as on a full disk; for one rank.

    The trainer empties the file and writes to it when all files of an iteration are written. Until
    then, a folder for what was there before says which iteration this is.
    """
    tracker = run / TRACKER
    begun = [path.name.removeprefix(_PREVIOUS) for path in run.glob(f"{_PREVIOUS}*")]
    if len(begun) != 1 or not tracker.exists() or tracker.stat().st_size:
        return
    unfinished = tracker.with_name(f"{TRACKER}.unfinished")
    # who only reads from a folder may have no right to write to it
    with contextlib.suppress(OSError):
        unfinished.write_text(begun[0].removeprefix("iter_"))
        os.replace(unfinished, tracker)


def read_tracker(tracker: Path) -> int | Literal["release"]:
    """Return the iteration that a tracker file names, or ``"release"``.

    Raises:
        CheckpointError: If the file says something else.
    """
    text = tracker.read_text(errors="replace").strip()
    if text == "release":
        return "release"
    if text.isdecimal() and text.isascii():
        return int(text)
    rule = f"must hold the number of an iteration, but holds {text[:40]!r}"
    hint = "Write the number of a complete iteration into this file, or pass --ckpt-step"
    raise CheckpointError("checkpoint", str(tracker), rule, hint)


def folder_name(iteration: int | Literal["release"]) -> str:
    """Return the name of an iteration's folder."""
    return iteration if iteration == "release" else f"iter_{iteration:07d}"


def _is_tracked(folder: Path) -> bool:
    try:
        return folder_name(read_tracker(folder.with_name(TRACKER))) == folder.name
    except (CheckpointError, FileNotFoundError):
        return False


def _lock(previous: Path) -> None:
    """Lock a folder, if it exists and its file system has locks."""
    _unlock(previous)
    try:
        _locks[previous] = os.open(previous, os.O_RDONLY)
        fcntl.flock(_locks[previous], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        _unlock(previous)
        name = previous.name.removeprefix(_PREVIOUS)
        rule = f"is a folder to which another process is saving {name}"
        hint = "Stop the other run, or give each run a folder of its own"
        raise CheckpointError("save", str(previous.parent), rule, hint) from error
    except OSError as error:
        logger.debug("%s cannot be locked: %s", previous, error)


def _unlock(previous: Path) -> None:
    if previous in _locks:
        os.close(_locks.pop(previous))


def _previous_of(folder: Path) -> Path:
    # a relative path may be only a dot
    folder = Path(os.path.abspath(folder))
    return folder.parent / f"{_PREVIOUS}{folder.name}"


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)
