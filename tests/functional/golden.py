"""Recorded values: one JSON file per case and environment."""

import contextlib
import importlib.metadata
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from tests.functional.case_files import Case, Environment
from tests.functional.metrics import METRICS, Metrics
from tests.functional.runner import SHARED

FOLDER = Path(__file__).with_name("golden")
_VERSIONS = ("torch", "megatron-core", "emerging-optimizers")


class GoldenError(ValueError):
    """A recorded file that is absent, stale or damaged; the message says how to record it."""


def path_of(name: str, environment: str, folder: Path = FOLDER) -> Path:
    """Return where a case's values are recorded."""
    return folder / environment / f"{name}.json"


def description(environment: Environment) -> dict[str, str]:
    """Return what a result may depend on here: versions and the kind of machine."""
    found = {name: importlib.metadata.version(name) for name in _VERSIONS}
    if environment == "gpu_nccl":
        machine = torch.cuda.get_device_name()
    else:
        machine = f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"
    return {**found, "python": platform.python_version(), "machine": machine}


def _processor() -> str:
    """Return the processor's model, or its architecture where the system does not tell."""
    with contextlib.suppress(OSError):
        match = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if match is not None:
            return match[1]
    return platform.machine()


def write(case: Case, environment: Environment, metrics: Metrics, folder: Path = FOLDER) -> Path:
    """Record a case's metrics; the file appears whole or not at all."""
    path = path_of(case.name, environment, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "case": case.name,
        "fingerprint": case.fingerprint(SHARED),
        "environment": description(environment),
        "metrics": metrics,
    }
    draft = path.with_suffix(".tmp")
    draft.write_text(_readable(record) + "\n")
    os.replace(draft, path)
    return path


def read(case: Case, environment: Environment, folder: Path = FOLDER) -> dict[str, Any]:
    """Return what was recorded for a case.

    Raises:
        GoldenError: If nothing was, if it was for other flags, or if the file is damaged.
    """
    path = path_of(case.name, environment, folder)
    again = f"python -m tests.functional.record --environment {environment} {case.name}"
    if not path.exists():
        raise GoldenError(f"{case.name} is not recorded in {environment}: {again}")
    try:
        record = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise GoldenError(f"{path} is damaged ({error}): {again}") from error
    if set(record) != {"case", "fingerprint", "environment", "metrics"}:
        raise GoldenError(f"{path} is damaged: {again}")
    if set(record["metrics"]) != set(METRICS):
        raise GoldenError(f"{path} holds other metrics: {again}")
    if record["case"] != case.name or record["fingerprint"] != case.fingerprint(SHARED):
        raise GoldenError(f"{path} is stale, the case's flags were changed since: {again}")
    return record


def compare_environments(recorded: dict[str, str], environment: Environment) -> str:
    """Return a sentence about what is not as it was when the values were recorded, or nothing."""
    here = description(environment)
    changed = [
        f"{name} {recorded.get(name)!r}, here {here[name]!r}"
        for name in here
        if recorded.get(name) != here[name]
    ]
    return f"recorded with {'; '.join(changed)}" if changed else ""


def _readable(record: dict[str, Any]) -> str:
    """JSON with one line per metric."""
    text = json.dumps(record | {"metrics": "@"}, indent=2)
    lines = [f"    {json.dumps(name)}: {json.dumps(v)}" for name, v in record["metrics"].items()]
    return text.replace('"@"', "{\n" + ",\n".join(lines) + "\n  }")
