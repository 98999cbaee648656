"""The manifest of a checkpoint folder: which files it has, their sizes and digests, who wrote it.

It is the last file written into the folder: a folder that has one was finished.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import distributed

from megatron_eopt.base.agreement import (
    CheckpointError,
    agreed,
    everyones,
    from_rank_0,
    is_rank_0,
)

logger = logging.getLogger(__name__)

MANIFEST = "eopt_manifest.json"
_FORM = 1
_WORKERS = 4
_SHOWN = 5
_NUMBERED = re.compile(r"__(\d+)_\d+\.distcp")
_RESTORE = (
    "Restore the file, load another iteration with --ckpt-step, or remove the folder so that an "
    "earlier one is found"
)


@dataclass(frozen=True)
class FileRecord:
    """What a file must be: its size in bytes and the SHA-256 digest of its contents, in hex."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Contents of the manifest file.

    Attributes:
        files: By path relative to the folder.
        written_by: What is known of the run: its model, its optimizer.
    """

    files: Mapping[str, FileRecord]
    written_by: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Manifest | None":
        """Read the manifest of ``folder``; None if it has none.

        Raises:
            CheckpointError: If it cannot be understood.
        """
        path = folder / MANIFEST
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_bytes())
            form = content["form"]
            files = {name: FileRecord(**record) for name, record in content["files"].items()}
            written_by = dict(content["written_by"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                "checkpoint", str(folder), f"its {MANIFEST} is damaged ({error})", _RESTORE
            ) from None
        if form != _FORM:
            raise CheckpointError(
                "checkpoint",
                str(folder),
                f"its {MANIFEST} has form {form}, and this release knows form {_FORM}",
                "Load it with the release of megatron-eopt that wrote it",
            )
        return cls(files, written_by)

    def write(self, folder: Path) -> None:
        """Write the manifest of ``folder``, at once or not at all."""
        content = {"form": _FORM, **asdict(self)}
        replace_file(folder / MANIFEST, json.dumps(content, indent=1, sort_keys=True) + "\n")

    def problems(self, folder: Path) -> list[str]:
        """Return what is wrong with the sizes of the files in ``folder``, one clause a file."""
        found = []
        for name, record in sorted(self.files.items()):
            try:
                size = (folder / name).stat().st_size
            except FileNotFoundError:
                found.append(f"its file {name} is missing")
                continue
            if size != record.size:
                found.append(f"its file {name} has {size} bytes instead of {record.size}")
        return found


def replace_file(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a killed process leaves the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_manifest(folder: Path, written_by: Mapping[str, Any], *, alone: bool = False) -> None:
    """Write the manifest of a finished folder; the ranks share the files out between them.

    Args:
        folder: Holds the checkpoint; the same files for every rank.
        written_by: What is known of the run.
        alone: Whether this process does everything itself, without communication.

    Raises:
        CheckpointError: If a rank cannot read a file.
    """
    if alone:
        names = _files(folder)
        Manifest(dict(_records(folder, names)), written_by).write(folder)
        return
    names = from_rank_0(lambda: _files(folder))
    records = everyones(agreed(lambda: _records(folder, _share(names))))
    from_rank_0(lambda: Manifest(dict(records), written_by).write(folder))


def verify(folder: Path, *, digests: bool = True) -> Manifest | None:
    """Compare the files of ``folder`` with its manifest; all ranks call this together.

    Args:
        folder: Holds the checkpoint.
        digests: Whether to read all files, shared out over the ranks, or only look at their sizes.

    Returns:
        The manifest; None for a folder without one, of which nothing can be said.

    Raises:
        CheckpointError: On every rank, if a file is missing or differs.
    """
    manifest = from_rank_0(lambda: _with_right_sizes(folder))
    if manifest is None:
        if is_rank_0():
            logger.warning(
                "checkpoint %s has no %s, so its files cannot be verified", folder, MANIFEST
            )
        return None
    if digests:
        names = _share(sorted(manifest.files))
        found = agreed(lambda: _records(folder, names))
        wrong = everyones(
            f"the contents of its file {name} have changed: SHA-256 {record.sha256[:16]}... "
            f"instead of {manifest.files[name].sha256[:16]}..."
            for name, record in found
            if record != manifest.files[name]
        )
        refuse(folder, wrong)
    return manifest


def refuse(folder: Path, problems: list[str]) -> None:
    """Raise a CheckpointError if there are ``problems``."""
    if problems:
        more = len(problems) - _SHOWN
        rule = "; ".join(problems[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise CheckpointError("checkpoint", str(folder), rule, _RESTORE)


def _with_right_sizes(folder: Path) -> Manifest | None:
    if not folder.is_dir():
        refuse(folder, ["there is no such folder"])
    manifest = Manifest.read(folder)
    if manifest is not None:
        refuse(folder, manifest.problems(folder))
    return manifest


def _files(folder: Path) -> list[str]:
    """Return the checkpoint's files; hidden ones are partial, but for torch's metadata."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    kept = [p for p in paths if p.name == ".metadata" or not p.name.startswith(".")]
    return sorted(path.relative_to(folder).as_posix() for path in kept)


def _share(names: list[str]) -> list[str]:
    """Return those of ``names`` that this rank reads: if it can, those that it wrote."""
    if not distributed.is_initialized():
        return names
    world, rank = distributed.get_world_size(), distributed.get_rank()
    numbered = {name: int(match[1]) for name in names if (match := _NUMBERED.fullmatch(name))}
    others = (name for name in names if name not in numbered)
    owner = {**numbered, **{name: number for number, name in enumerate(others)}}
    return [name for name in names if owner[name] % world == rank]


def _records(folder: Path, names: list[str]) -> list[tuple[str, FileRecord]]:
    with ThreadPoolExecutor(_WORKERS) as pool:
        return list(zip(names, pool.map(lambda name: _record(folder / name), names), strict=True))


def _record(path: Path) -> FileRecord:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return FileRecord(file.tell(), digest)
    except OSError as error:
        problem = f"its file {path.name} cannot be read ({error})"
        raise CheckpointError("checkpoint", str(path.parent), problem, _RESTORE) from None
