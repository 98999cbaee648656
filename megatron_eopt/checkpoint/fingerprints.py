"""Tells the files of one save from files of the same names and sizes that another save has written.

torch writes checksums of all tensors to the end of whatever it saves. A fingerprint is a hash of
these ends, so that no large file is read as a whole.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

FINGERPRINTS = "fingerprints.json"
"""File with the fingerprints of a checkpoint's other files, by path relative to the folder."""

ZIP_START = b"PK\x03\x04"
"""How all that torch saves begins."""

_END_BYTES = 4096
"""How much of its end is read: the last entry of the directory has a checksum of checksums."""

type Slice = tuple[int, int]
"""Offset and length in bytes."""


def fingerprint(path: Path, slices: Sequence[Slice] = ()) -> str:
    """Return the fingerprint of a file, in which torch has saved one thing in each slice.

    Without slices, the file is one. What torch has not saved is read as a whole.
    """
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        for start, length in slices or [(0, path.stat().st_size)]:
            digest.update(f"{start} {length}\n".encode())
            file.seek(start)
            has_checksums = file.read(len(ZIP_START)) == ZIP_START
            skipped = max(0, length - _END_BYTES) if has_checksums else 0
            file.seek(start + skipped)
            digest.update(file.read(length - skipped))
    return digest.hexdigest()


def write_fingerprints(folder: Path, found: Mapping[str, str]) -> None:
    """Write the file of fingerprints, whole or not at all."""
    unfinished = folder / f"{FINGERPRINTS}.unfinished"
    unfinished.write_text(json.dumps(dict(sorted(found.items())), indent=1))
    os.replace(unfinished, folder / FINGERPRINTS)


def read_fingerprints(folder: Path) -> dict[str, str]:
    """Return the fingerprints of a checkpoint's files; empty if the save has written none.

    Raises:
        ValueError: If the file has something else.
    """
    try:
        found = json.loads((folder / FINGERPRINTS).read_text())
    except FileNotFoundError:
        return {}
    if not isinstance(found, dict) or not found:
        raise ValueError("it has no fingerprints")
    return found
