"""What figures are of: the machine, its packages, the commit; and how they are written."""

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "megatron-core", "emerging-optimizers", "transformer-engine")
_ROOT = Path(__file__).resolve().parents[1]


def about() -> dict[str, Any]:
    """Return what a reader of figures has to know to compare them with others."""
    found: dict[str, Any] = {
        "machine": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "commit": _commit(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_json(figures: Mapping[str, Any], path: Path, before: Mapping[str, Any]) -> None:
    """Write figures with what they are of; ``before`` is :func:`about` from before measuring."""
    document = {"about": dict(before), **figures}
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")


def in_turn[T](contestants: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield round and contestant; who goes first changes from round to round."""
    for round_ in range(rounds):
        turn = round_ % len(contestants)
        for contestant in (*contestants[turn:], *contestants[:turn]):
            yield round_, contestant


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*: (.*)$", info.read_text(), re.M) if info.exists() else None
    return name[1] if name else platform.processor() or platform.machine()


def _commit() -> str | None:
    call = ["git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
