"""Describe this machine, with Python's standard library only."""

import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def processor() -> str:
    """Return the processor's name."""
    info = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*: (.*)$", info.read_text(), re.M) if info.exists() else None
    return name[1] if name else platform.processor() or platform.machine()


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the commit, with ``-dirty`` if tracked files differ; empty outside of git.

    Changes below ``docs`` are ignored, since benchmarks write their figures to it.
    """
    git = ("git", "-C", str(ROOT))
    name = first_line(*git, "describe", "--always", "--abbrev=12")
    changed = first_line(*git, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    return f"{name}-dirty" if changed else name


def first_line(*command: str) -> str:
    """Return the first line that a program prints, or an empty string if it fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""
