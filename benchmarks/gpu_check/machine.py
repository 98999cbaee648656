"""Print as JSON what results depend on: the machine, versions and source code."""

import hashlib
import json
import platform
import sys
from importlib.util import find_spec
from typing import Any

from benchmarks.gpu_check.plan import NEEDED
from benchmarks.machine import ROOT, commit, first_line, versions

PACKAGES = (
    "torch",
    "triton",
    "megatron-core",
    "emerging-optimizers",
    "transformer-engine",
    "apex",
    "gram-newton-schulz",
    "numpy",
)


def describe() -> dict[str, Any]:
    """Return versions, GPUs and missing packages."""
    missing = sorted({package for module, package in NEEDED.items() if not _is_there(module)})
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": versions(PACKAGES),
        "commit": commit(),
        "sources": sources(),
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "missing": missing,
        "gpus": [],
    }
    if "torch" not in missing:
        found |= _of_torch()
    return found


def sources() -> str:
    """Return a hash of the code, which identifies it without git."""
    digest = hashlib.sha256()
    for folder in ("megatron_eopt", "arguments", "benchmarks/gpu_check", "tests", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _of_torch() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"cuda": torch.version.cuda}
    return {
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "gpus": [
            _gpu(torch.cuda.get_device_properties(number))
            for number in range(torch.cuda.device_count())
        ],
    }


def _gpu(properties: Any) -> dict[str, Any]:
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
    }


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


if __name__ == "__main__":
    # on a line of its own, since imports may print text
    sys.stdout.write("\n" + json.dumps(describe()) + "\n")
