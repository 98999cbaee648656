"""Write a benchmark's figures together with the machine, packages and commit that produced them."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import commit, processor, versions

PACKAGES = ("torch", "megatron-core", "emerging-optimizers", "transformer-engine")


def about() -> dict[str, Any]:
    """Return what is needed to compare figures: the machine, its load, packages and commit."""
    found: dict[str, Any] = {
        "machine": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "commit": commit() or None,
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found | versions(PACKAGES)


def publish(figures: Mapping[str, Any], before: Mapping[str, Any], path: Path | None) -> None:
    """Write figures as JSON, together with where they were measured.

    Args:
        figures: The measured values.
        before: The result of :func:`about` before the measurement.
        path: JSON file; None writes nothing.
    """
    if path is not None:
        text = json.dumps({"about": dict(before), **figures}, indent=2, allow_nan=False)
        path.write_text(f"{text}\n")


def table(head: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; columns whose name ends in ``:`` are aligned to the right."""
    names = [name.strip() for name in head.split("|")]
    rule = ["---:" if name.endswith(":") else "---" for name in names]
    lines = [[name.rstrip(":") for name in names], rule, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
