"""Checks that a checkpoint is complete before it is read, and protects one that is overwritten.

A save into the folder of an earlier checkpoint first moves that folder aside, and deletes it only
when the save has finished. If a run is killed in between, the next load moves it back. So a load
never mixes the files of two saves.
"""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import load_common_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_eopt.base.agreement import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
"""The trainer's file that names the last checkpoint."""

_METADATA, _CONFIG = ".metadata", "metadata.json"
_ASIDE = ".replaced_"


def latest(run: Path, *, must_exist: bool = True) -> str | None:
    """Return the name of the folder that a run's tracker file names; None without the file.

    Raises:
        CheckpointError: If the file names none, or one that does not exist although it must.
    """
    tracker = run / TRACKER
    if not tracker.exists():
        return None
    text = _read(tracker, lambda: tracker.read_text().strip())
    if text != "release" and not text.isdecimal():
        rule = f"must hold the number of an iteration, but holds {text[:20]!r}"
        raise _error(tracker, rule, "Write the number of a complete checkpoint into it")
    name = text if text == "release" else f"iter_{int(text):07d}"
    if must_exist and not (run / name).is_dir() and not (run / f"{_ASIDE}{name}").is_dir():
        way_out = "Write the number of a complete checkpoint into it"
        raise _error(tracker, f"names {name}, which does not exist", way_out)
    return name


def format_of(folder: Path) -> str:
    """Return the ``--ckpt-format`` of a checkpoint, after checking that its files are complete.

    ``torch_dcp`` also stands for ``fsdp_dtensor``, which has the same files.

    Raises:
        CheckpointError: If a file is missing or damaged; names the file.
    """
    if (folder / _METADATA).exists() or (folder / _CONFIG).exists():
        return _distributed(folder)
    files = sorted(folder.glob("mp_rank_*/*.pt"))
    if not any(file.name == "model_optim_rng.pt" for file in files):
        rule = f"is no complete checkpoint: it has neither {_METADATA} nor mp_rank_*/*.pt"
        raise _error(folder, rule)
    for file in files:
        if not zipfile.is_zipfile(file):
            raise _error(file, "is damaged: its end is missing")
    return "torch"


def _distributed(folder: Path) -> str:
    path = folder / _METADATA
    metadata: Any = _read(path, lambda: FileSystemReader(folder).read_metadata())
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        end = place.offset + place.length
        ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
    for name, end in sorted(ends.items()):
        file = folder / name
        if not file.is_file() or file.stat().st_size < end:
            size = f"has {file.stat().st_size} of {end} bytes" if file.is_file() else "is missing"
            raise _error(file, size)
    is_megatrons = any(key.startswith("common_state/") for key in metadata.state_dict_metadata)
    config = folder / _CONFIG
    if not config.exists() and not is_megatrons:
        return "torch_dcp"
    content = _read(config, lambda: json.loads(config.read_text()))
    if not isinstance(content, dict) or "sharded_backend" not in content:
        raise _error(config, "does not describe a checkpoint")
    _read(folder, lambda: load_common_state_dict(str(folder)))
    return "torch_dist"


def _read[T](file: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except Exception as error:  # a damaged file can raise anything
        text = "is missing" if isinstance(error, FileNotFoundError) else "cannot be read"
        raise _error(file, f"{text} ({type(error).__name__}: {error})") from error


def _error(file: Path, rule: str, way_out: str = "") -> CheckpointError:
    usual = "Restore the file, or load another iteration with --ckpt-step"
    return CheckpointError("checkpoint", str(file), rule, way_out or usual)


def set_aside(folder: Path) -> None:
    """Move a checkpoint away that is about to be overwritten."""
    aside = folder.with_name(f"{_ASIDE}{folder.name}")
    if not folder.is_dir():
        return
    if aside.is_dir():
        if not _is_complete(folder):
            # what was moved away before is still the last complete checkpoint
            shutil.rmtree(folder)
            return
        shutil.rmtree(aside)
    folder.rename(aside)


def forget_aside(folder: Path) -> None:
    """Delete what :func:`set_aside` moved away, after the save has finished."""
    shutil.rmtree(folder.with_name(f"{_ASIDE}{folder.name}"), ignore_errors=True)


def restore(folder: Path) -> bool:
    """Move back what was set aside if its replacement is not complete; return whether it was."""
    aside = folder.with_name(f"{_ASIDE}{folder.name}")
    if not aside.is_dir():
        return False
    if _is_complete(folder):
        shutil.rmtree(aside)
        return False
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    return True


def _is_complete(folder: Path) -> bool:
    """Return whether a save into a new folder has finished."""
    try:
        # files of this format have no end mark; their saves delete what was set aside
        return format_of(folder) != "torch"
    except CheckpointError:
        return False
