"""What figures are of: the machine, its packages, the commit; and how they are published."""

import json
import os
from collections.abc import Callable, Mapping
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


def publish(
    figures: Mapping[str, Any],
    before: Mapping[str, Any],
    path: Path | None,
    shown: Callable[[dict[str, Any]], str] | None = None,
) -> None:
    """Write figures with what they are of, and print what the page says of them.

    Args:
        figures: All that was measured.
        before: :func:`about` from before measuring.
        path: JSON file; None writes none.
        shown: The page's section (:mod:`benchmarks.page.sections`); None prints nothing.
    """
    text = json.dumps({"about": dict(before), **figures}, indent=2, allow_nan=False) + "\n"
    if shown is not None:
        # as the page reads it
        print(shown(json.loads(text)))
    if path is not None:
        path.write_text(text)
