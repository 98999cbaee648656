"""Programs that run to their end on the CPU, in processes of their own."""

import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def finished(
    *command: object, folder: Path = ROOT, timeout: float | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder, with variables of the environment; return how it ended."""
    usual = {"MEGATRON_EOPT_DEVICE": "cpu", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*map(str, command)],
        env=os.environ | usual | variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def output_of(*command: object, **how: Any) -> str:
    """Run a program that must succeed, as :func:`finished` does; return what it prints."""
    done = finished(*command, **how)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-3000:]
    return done.stdout
