"""What figures are of: the machine, its packages, the commit; and how they are published."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import commit, processor, versions

PACKAGES = ("torch", "megatron-core", "emerging-optimizers", "transformer-engine")


def about() -> dict[str, Any]:
    """Return what a reader of figures has to know to compare them with others."""
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
    """Write figures with what they are of.

    Args:
        figures: All that was measured.
        before: :func:`about` from before measuring.
        path: JSON file; None writes none.
    """
    if path is not None:
        text = json.dumps({"about": dict(before), **figures}, indent=2, allow_nan=False)
        path.write_text(f"{text}\n")


def table(head: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; a column whose name ends in ``:`` has numbers."""
    names = [name.strip() for name in head.split("|")]
    rule = ["---:" if name.endswith(":") else "---" for name in names]
    lines = [[name.rstrip(":") for name in names], rule, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
