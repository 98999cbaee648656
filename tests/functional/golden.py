"""Recorded values and their spread: one JSON file per case and environment."""

import importlib.metadata
import json
import platform
import re
from pathlib import Path
from typing import Any

import torch

from benchmarks.files import write_whole
from tests.functional.case_files import Case, Environment
from tests.functional.metrics import Metrics
from tests.functional.runner import SHARED
from tests.harness.last_bits import LARGEST_MOVE, MOVED_OF_16_BITS

type Spread = dict[str, list[float]]

FOLDER = Path(__file__).with_name("golden")
SEEDS = 6
"""How many runs with other last bits a spread comes from."""

_BASIS = [*SHARED, f"{SEEDS} {LARGEST_MOVE} {MOVED_OF_16_BITS}"]
"""What all records depend on: the flags of all cases, and how a spread is measured."""


def place_of(environment: Environment) -> str:
    """Return the name of the folder of an environment; each model of GPU has one of its own."""
    if environment == "cpu_gloo":
        return environment
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "without a gpu"
    return "nccl_" + re.sub(r"\W+", "_", gpu.lower())


def path_of(name: str, environment: Environment, folder: Path = FOLDER) -> Path:
    """Return where a case's values are recorded."""
    return folder / place_of(environment) / f"{name}.json"


def description(environment: Environment) -> dict[str, str]:
    """Return what a result may depend on here: versions and the kind of machine."""
    names = ("torch", "megatron-core", "emerging-optimizers")
    on_gpu = environment == "gpu_nccl"
    capability = torch.backends.cpu.get_cpu_capability()
    machine = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()}, {capability}"
    versions = {name: importlib.metadata.version(name) for name in names}
    return {**versions, "python": platform.python_version(), "machine": machine}


def write(
    case: Case, environment: Environment, metrics: Metrics, spread: Spread, folder: Path = FOLDER
) -> Path:
    """Record a case's spread, and the metrics of golden cases."""
    path = path_of(case.name, environment, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    rounded = {name: [float(f"{value:.2g}") for value in values] for name, values in spread.items()}
    record: dict[str, Any] = {
        "case": case.name,
        "fingerprint": case.fingerprint(_BASIS),
        "environment": description(environment),
    }
    if case.kind == "golden":
        record["metrics"] = metrics
    record["spread"] = rounded
    write_whole(path, _readable(record) + "\n")
    return path


def read(case: Case, environment: Environment, folder: Path = FOLDER) -> dict[str, Any]:
    """Return what was recorded for a case; ValueError if nothing was, or for other flags."""
    path = path_of(case.name, environment, folder)
    again = f"python -m tests.functional.record --environment {environment} {case.name}"
    if not path.exists():
        raise ValueError(f"{case.name} is not recorded in {environment}: {again}")
    record: dict[str, Any] = json.loads(path.read_text())
    if record["case"] != case.name or record["fingerprint"] != case.fingerprint(_BASIS):
        raise ValueError(f"{path} is stale, what it depends on was changed since: {again}")
    return record


def _readable(record: dict[str, Any]) -> str:
    """JSON with one line per metric."""
    parts = [part for part in ("metrics", "spread") if part in record]
    text = json.dumps(record | {part: f"@{part}" for part in parts}, indent=2)
    for part in parts:
        lines = [f"    {json.dumps(name)}: {json.dumps(v)}" for name, v in record[part].items()]
        text = text.replace(f'"@{part}"', "{\n" + ",\n".join(lines) + "\n  }")
    return text
