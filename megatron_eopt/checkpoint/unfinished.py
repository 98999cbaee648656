"""Which folder has the complete checkpoint of an iteration, also after a save was killed.

While the trainer writes ``iter_0000010``, the folder ``previous.iter_0000010`` beside it holds what
was there before, and is empty if nothing was. When all files are written, one renaming ends this
state. All folders are local or shared file systems, since remote storage cannot rename.
"""

import contextlib
import os
import shutil
import uuid
from pathlib import Path
from typing import Literal

from megatron_eopt.base.agreement import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's file with the iteration to load, which is written after the checkpoint."""

_PREVIOUS, _OBSOLETE = "previous.", "obsolete."


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
    """Set the content of an iteration aside before it is saved anew; for one rank."""
    previous = _previous_of(folder)
    # there is a complete checkpoint, which runs load until the new save has ended
    if complete_folder(folder) == folder and os.path.lexists(folder):
        with contextlib.suppress(FileNotFoundError):
            # left by a save that was killed after the tracker was written
            previous.rmdir()
        # renaming is atomic: a kill leaves either the old state or this one
        folder.rename(previous)
        return
    # files of an unfinished save, perhaps of more ranks
    _remove(folder)
    previous.mkdir(parents=True, exist_ok=True)


def finish(folder: Path) -> None:
    """Make a saved iteration the one that is loaded; for one rank, when all ranks have saved."""
    # removing a folder takes time, and a kill would leave a part of it
    _previous_of(folder).rename(folder.with_name(f"{_OBSOLETE}{uuid.uuid4().hex}"))
    for obsolete in folder.parent.glob(f"{_OBSOLETE}*"):
        _remove(obsolete)


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


def _previous_of(folder: Path) -> Path:
    # a relative path may be only a dot
    folder = Path(os.path.abspath(folder))
    return folder.parent / f"{_PREVIOUS}{folder.name}"


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)
