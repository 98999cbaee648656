"""Packages from a folder of wheels, put beside the results and not into the environment."""

import subprocess
import sys
from pathlib import Path


class WheelsError(RuntimeError):
    """Wheels could not be installed; the message says why."""


def install(wheels: Path, site: Path) -> None:
    """Install all wheels of a folder into another, with neither network nor dependencies.

    What is there already is not installed again, by name.

    Raises:
        WheelsError: If there is no wheel, or pip fails.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise WheelsError(f"--wheels {wheels}: no file there ends in .whl")
    record = site / "installed"
    names = "\n".join(file.name for file in files)
    if record.exists() and record.read_text() == names:
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--disable-pip-version-check", "--upgrade", "--find-links", str(wheels)]
    command += ["--target", str(site), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise WheelsError(f"--wheels {wheels}: {done.stderr.strip()[-2000:]}")
    record.write_text(names)
