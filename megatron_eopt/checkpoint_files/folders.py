"""Which of the folders that a run has left to load, and how to clear the way for a new one."""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.checkpoint_files.manifest import MANIFEST, Manifest, replace_file

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_ITERATION = re.compile(r"iter_(\d+)")
_PARTS = (
    MANIFEST,
    "metadata.json",
    ".metadata",
    "common.pt",
    "*.distcp",
    ".*.partial",
    "mp_rank_*/model_optim_rng.pt",
    "mp_rank_*/distrib_optim.pt",
    "mp_rank_*/layer_wise_optimizer_*.pt",
)
"""What savers write into a folder; the manifest first, so that a folder half cleared has none."""

_METADATA = "metadata.json"
"""What megatron-core writes last, in the one format that has such a file."""

_MARKS = (MANIFEST, _METADATA)
"""Of a finished checkpoint."""

_ANNOUNCED = ".unfinished_saves"
"""Names the folders of saves that have begun, until a first one has finished."""


@dataclass(frozen=True)
class Choice:
    """The checkpoint to load.

    Attributes:
        iteration: Its number; 0 for a release.
        release: Whether it is the folder "release".
    """

    iteration: int
    release: bool = False

    @property
    def name(self) -> str:
        """Name of its folder."""
        return RELEASE if self.release else f"iter_{self.iteration:07d}"


def checkpoint_folders(root: Path) -> list[Choice]:
    """Return the checkpoints below ``root``, finished or not, the newest first."""
    if not root.is_dir():
        return []
    numbers = [
        int(match[1])
        for path in root.iterdir()
        if (match := _ITERATION.fullmatch(path.name)) and path.is_dir()
    ]
    return [Choice(number) for number in sorted(numbers, reverse=True)]


def has_checkpoints(root: Path) -> bool:
    """Return whether a save may have finished below ``root``.

    None has if there is no tracker file, and every folder was announced, and has neither a manifest
    nor megatron-core's mark of a finished checkpoint.
    """
    killed = _announced(root)
    return (root / TRACKER).exists() or any(
        item.name not in killed or any((root / item.name / mark).exists() for mark in _MARKS)
        for item in checkpoint_folders(root)
    )


def announce(root: Path, name: str) -> None:
    """Note that a save into the folder ``name`` begins, unless one has finished before."""
    names = _announced(root)
    if not (root / TRACKER).exists() and name not in names:
        root.mkdir(parents=True, exist_ok=True)
        replace_file(root / _ANNOUNCED, "".join(f"{item}\n" for item in (*names, name)))


def replace_tracker(tracker: Path, text: str) -> None:
    """Let the tracker file say ``text``, at once or not at all."""
    replace_file(tracker, text)
    (tracker.parent / _ANNOUNCED).unlink(missing_ok=True)


def choose(root: Path) -> Choice | None:
    """Return the checkpoint that the tracker file names or, if it cannot be, the newest whole one.

    A folder is whole if all files of its manifest have their sizes. Folders of savers that write no
    manifest are taken as they are, but not beside folders that have one.

    Returns:
        None if there is neither a tracker file nor more than what killed saves have left.

    Raises:
        CheckpointError: If there are checkpoints, and none is whole.
    """
    folders = checkpoint_folders(root)
    tracker = root / TRACKER
    if not has_checkpoints(root):
        if folders:
            logger.warning(
                "%s: starting from scratch. No save has ever finished there: %s",
                root,
                ", ".join(item.name for item in reversed(folders)),
            )
        return None
    named = _named(tracker)
    manifests = any((root / item.name / MANIFEST).exists() for item in folders)
    # the tracker file is written when all others are, also by who writes no manifests
    others = manifests and not (named is not None and (root / named.name / _METADATA).exists())
    reason = _why_not_named(tracker, named) or _why_not_whole(root, named, others)
    if reason is None:
        return named
    for item in folders:
        if item != named and _is_finished(root, item, manifests):
            logger.warning("%s: %s. Loading %s, the newest whole one", root, reason, item.name)
            return item
    raise CheckpointError(
        "checkpoint",
        str(root),
        f"{reason}, and no other checkpoint there is whole",
        "Load a folder by hand with --ckpt-step, or remove what is there to start from scratch",
    )


def clear(folder: Path) -> None:
    """Remove what an earlier save, finished or killed, has left in ``folder``."""
    for path in _leftovers(folder):
        path.unlink(missing_ok=True)


def forget_garbled_tracker(root: Path) -> None:
    """Remove a tracker file that says nothing; the save in progress writes a new one."""
    tracker = root / TRACKER
    if tracker.exists() and _named(tracker) is None:
        logger.warning("%s: removed, since its contents are no iteration", tracker)
        tracker.unlink()


def _leftovers(folder: Path) -> Iterator[Path]:
    for pattern in _PARTS:
        yield from sorted(folder.glob(pattern))


def _announced(root: Path) -> list[str]:
    path = root / _ANNOUNCED
    return path.read_text().split() if path.exists() else []


def _named(tracker: Path) -> Choice | None:
    text = tracker.read_text(errors="replace").strip() if tracker.exists() else ""
    if text == RELEASE:
        return Choice(0, release=True)
    return Choice(int(text)) if text.isascii() and text.isdigit() else None


def _why_not_named(tracker: Path, named: Choice | None) -> str | None:
    if named is not None:
        return None
    if not tracker.exists():
        return f"there are checkpoints, but no {TRACKER}"
    return f"{TRACKER} must name an iteration, and says {tracker.read_text(errors='replace')!r}"


def _why_not_whole(root: Path, item: Choice | None, manifests: bool) -> str | None:
    if item is None:
        return None
    folder = root / item.name
    if not folder.is_dir():
        return f"{TRACKER} names {item.name}, which does not exist"
    try:
        manifest = Manifest.read(folder)
    except CheckpointError:
        return f"the {MANIFEST} of {item.name} is damaged"
    if manifest is None:
        unfinished = f"{item.name} was not finished: other checkpoints have a {MANIFEST}"
        return unfinished if manifests and not item.release else None
    problems = manifest.problems(folder)
    return f"{item.name} is not whole: {'; '.join(problems[:3])}" if problems else None


def _is_finished(root: Path, item: Choice, manifests: bool) -> bool:
    # as a saver without manifests leaves it
    finished = manifests or (root / item.name / _METADATA).exists()
    return finished and _why_not_whole(root, item, manifests) is None
