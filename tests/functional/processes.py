"""What Linux says about the processes that run."""

import os
from pathlib import Path


def all_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def environment_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def rank_of(pid: int) -> int | None:
    ranks = [item[5:] for item in environment_of(pid) if item.startswith(b"RANK=")]
    return int(ranks[0]) if ranks else None


def parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
