"""What results depend on: the machine, versions, and the sources. Prints it as JSON."""

import hashlib
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

from benchmarks.gpu_check.plan import NEEDED, ROOT

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
    """Return versions, GPUs, and what is missing."""
    missing = sorted({package for module, package in NEEDED.items() if not _is_there(module)})
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "commit": _output("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"),
        "sources": sources(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "missing": missing,
        "gpus": [],
    }
    if "torch" not in missing:
        found |= _of_torch()
    return found


def sources() -> str:
    """Return a hash of the code that runs: without git, it is what tells two states apart."""
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


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    """Return the first line that a program prints, or nothing."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    # what imports may print comes before
    sys.stdout.write("\n" + json.dumps(describe()) + "\n")
