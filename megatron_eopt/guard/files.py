"""Finds missing, damaged and foreign files of a checkpoint before anything is loaded from it.

Small files are read. Of files with tensors, the length is checked, and the start of the first and
the end of the last tensor. The list that a save writes tells whether all files are of that save:
torch ends whatever it saves with checksums of all its tensors, so a hash of these ends is enough.
"""

import functools
import hashlib
import io
import json
import logging
import operator
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import distributed
from torch.distributed.checkpoint.metadata import Metadata

from megatron_eopt.base.agreement import (
    CheckpointError,
    from_rank_0,
    gather_objects,
    gather_unique,
    raise_together,
)
from megatron_eopt.guard.contents import (
    CONFIG,
    METADATA,
    content_of_metadata,
    damaged,
    forget_metadata,
    form_of,
    read_metadata,
    read_pt,
)

logger = logging.getLogger(__name__)

LIST = "fingerprints.json"
"""The list of a checkpoint's other files: their fingerprints by path relative to the folder."""

_ZIP_START, _ZIP_END, _ZIP_END_BYTES = b"PK\x03\x04", b"PK\x05\x06", 22
_END_BYTES = 4096
"""How much of its end is read: the last entry of the directory has a checksum of checksums."""

type Slice = tuple[int, int]
"""Offset and length in bytes."""

type Files = dict[str, tuple[Slice, ...]]
"""Files by path relative to the folder, each with the slices of its tensors, in order."""


def check(folder: Path, *, every_byte: bool = False) -> object:
    """Check all files of a checkpoint; collective over the world, whose ranks share the work.

    Args:
        folder: Folder of the checkpoint.
        every_byte: Whether to read all tensors and compare them with torch's checksums.

    Returns:
        The :func:`identity_of` the save that was checked.

    Raises:
        CheckpointError: If a file is missing, damaged or of another save; names it.
    """
    identity, (files, listed) = from_rank_0(lambda: (identity_of(folder), _needed(folder)))
    raise_together(lambda: _check_share(folder, files, every_byte=every_byte))
    share = raise_together(lambda: _fingerprints_of_share(folder, files) if listed else {})
    now = dict(gather_unique(share.items()))
    foreign = sorted(name for name in now.keys() & listed.keys() if now[name] != listed[name])
    # all saves write the same configuration
    old, new = ({each[name] for name in each if name != CONFIG} for each in (listed, now))
    if len(foreign) > 1 and not old & new:
        text = "all files are of a later save, by a program without this package"
        from_rank_0(lambda: logger.warning("%s: %s", folder / LIST, text))
    elif foreign:
        others = f", and so are {len(foreign) - 1} other files" if foreign[1:] else ""
        rule = f"is not the file that the save of this checkpoint wrote{others}"
        hint = (
            "Restore it, or load another iteration with --ckpt-step. If you have changed files on "
            f"purpose, remove {LIST}"
        )
        raise CheckpointError("checkpoint", str(folder / foreign[0]), rule, hint)
    return identity


def identity_of(folder: Path) -> object:
    """Return what tells a save to a folder from others: its list, else when it wrote small files.

    Saves of equal values may have the same.
    """
    try:
        return (folder / LIST).read_bytes()
    except OSError:
        stats = ((name, _stat(folder / name)) for name in (METADATA, CONFIG, "common.pt"))
        return tuple((name, *found) for name, found in stats if found)


def _stat(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def check_unchanged(folder: Path, identity: object) -> None:
    """Raise a CheckpointError if another save has replaced what was read from a folder."""
    if identity_of(folder) != identity:
        rule = "was replaced by another save while it was read, so ranks may have values of both"
        raise CheckpointError("checkpoint", str(folder), rule, "Load it again")


def is_complete(folder: Path) -> bool:
    """Return whether no file of a checkpoint is missing, as far as small files tell."""
    try:
        return all((folder / name).exists() for name in _needed(folder)[0])
    except CheckpointError:
        return False


def fingerprints_of(folder: Path) -> dict[str, str]:
    """Return the fingerprints of a new checkpoint's files; collective over the world.

    Raises:
        CheckpointError: If a file is missing or damaged.
    """
    # one rank lists the folder, which on a shared file system may look different to others
    files = from_rank_0(lambda: _present(folder))
    share = raise_together(lambda: _fingerprints_of_share(folder, files))
    forget_metadata()
    return functools.reduce(operator.or_, gather_objects(share))


def _present(folder: Path) -> Files:
    """Return the files of a checkpoint if this rank sees those of all ranks."""
    files, _ = _needed(folder)
    for name in files:
        if not (folder / name).exists():
            rule = "is not there for rank 0: it was not written, or is on another node's own disk"
            hint = "Save to a folder on a file system that all nodes see"
            raise CheckpointError("save", str(folder / name), rule, hint)
    return files


def write_list(folder: Path, fingerprints: Mapping[str, str]) -> None:
    """Write the list of a checkpoint's files, whole or not at all."""
    unfinished = folder / f"{LIST}.unfinished"
    unfinished.write_text(json.dumps(dict(sorted(fingerprints.items())), indent=1))
    unfinished.replace(folder / LIST)


def is_part_of_a_checkpoint(path: Path) -> bool:
    """Return whether a file or folder has the name of what a save writes."""
    names = (METADATA, CONFIG, LIST, "*.distcp", "mp_rank_*", "common.pt", "integrity.json")
    return any(map(path.match, names))


def fingerprint(path: Path, slices: Sequence[Slice] = ()) -> str:
    """Return the fingerprint of a file, in which torch has saved one thing in each slice.

    Without slices, the file is one. What torch has not saved is read as a whole.
    """
    digest = hashlib.blake2b(digest_size=16)
    is_read = path.name == METADATA  # and checked already
    with io.BytesIO(content_of_metadata(path.parent)[0]) if is_read else path.open("rb") as file:
        for start, length in slices or [(0, path.stat().st_size)]:
            digest.update(f"{start} {length}\n".encode())
            file.seek(start)
            has_checksums = file.read(len(_ZIP_START)) == _ZIP_START
            skipped = max(0, length - _END_BYTES) if has_checksums else 0
            file.seek(start + skipped)
            digest.update(file.read(length - skipped))
    return digest.hexdigest()


def _needed(folder: Path) -> tuple[Files, dict[str, str]]:
    """Return the files that a complete checkpoint has, and those that its save has listed."""
    if not folder.is_dir():
        raise damaged(folder, "does not exist")
    try:
        path = folder / LIST
        listed = json.loads(path.read_text()) if path.exists() else {}
        if not isinstance(listed, dict) or (path.exists() and not listed):
            raise ValueError("it has no fingerprints")
    except Exception as error:  # a damaged file can raise anything
        raise damaged(path, f"cannot be read ({type(error).__name__}: {error})") from error
    form = form_of(folder)
    if form == "torch":
        present = (str(path.relative_to(folder)) for path in folder.glob("mp_rank_*/*.pt"))
        return dict.fromkeys([*present, *listed], ()), listed
    # other back ends have files of their own, which are not checked
    if form not in ("torch_dist", "dcp"):
        return {}, listed
    metadata = read_metadata(folder)
    # torch notes how to nest the keys, megatron-core does not
    if form == "dcp" and not metadata.planner_data:
        raise damaged(folder, f"lacks the file {CONFIG}, which a save of torch_dist writes last")
    small = [METADATA] if form == "dcp" else [METADATA, CONFIG]
    return dict.fromkeys(small, ()) | _tensors_in(metadata), listed


def _tensors_in(metadata: Metadata) -> Files:
    slices_of: dict[str, list[Slice]] = {}
    for item in metadata.storage_data.values():
        # a compressed tensor does not start and end as torch writes it
        if not getattr(item, "transform_descriptors", None):
            slices_of.setdefault(item.relative_path, []).append((item.offset, item.length))
    # tensors are written one after another, so the last one ends where the file does
    return {name: tuple(sorted(slices)) for name, slices in slices_of.items()}


def _share(files: Files) -> list[str]:
    """Return this rank's share of files: of those with tensors, and of others."""
    alone = not distributed.is_initialized()
    rank, world = (0, 1) if alone else (distributed.get_rank(), distributed.get_world_size())
    # rank 0 has read the metadata
    read = [name for name in (METADATA,) if rank == 0 and name in files]
    return sorted(files.keys() - {METADATA}, key=lambda n: (not files[n], n))[rank::world] + read


def _fingerprints_of_share(folder: Path, files: Files) -> dict[str, str]:
    return {name: fingerprint(folder / name, files[name]) for name in _share(files)}


def _check_share(folder: Path, files: Files, *, every_byte: bool) -> None:
    """Check this rank's share of a checkpoint's files."""
    for name in _share(files):
        path, slices = folder / name, files[name]
        if not path.exists():
            raise damaged(path, "does not exist")
        if slices:
            _check_ends(path, slices[0], slices[-1])
        elif path.suffix == ".pt":
            read_pt(path)
        if every_byte and (slices or path.suffix == ".pt"):
            _check_bytes(path, slices or [(0, path.stat().st_size)])


def _check_ends(path: Path, first: Slice, last: Slice) -> None:
    # offset plus length of the last tensor
    size, wanted = path.stat().st_size, sum(last)
    if size < wanted:
        raise damaged(path, f"has {size:,} of {wanted:,} bytes")
    with path.open("rb") as file:
        file.seek(first[0])
        start = file.read(len(_ZIP_START))
        # torch saves each tensor as a zip archive, which ends with a record of this size
        file.seek(wanted - _ZIP_END_BYTES)
        end = file.read(len(_ZIP_END))
    if (start, end) != (_ZIP_START, _ZIP_END):
        raise damaged(path, "does not contain the tensors that the metadata names")


def _check_bytes(path: Path, slices: Sequence[Slice]) -> None:
    """Compare all that torch has saved in a file with the checksums that it has written."""
    with path.open("rb") as file:
        for start, length in slices:
            file.seek(start)
            content = io.BytesIO(file.read(length))
            # an old format of torch has none
            if zipfile.is_zipfile(content) and zipfile.ZipFile(content).testzip() is not None:
                raise damaged(path, f"has wrong bytes among those from {start:,} on")
