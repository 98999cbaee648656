"""Install packages from a folder of wheels next to the results, not into the environment."""

import subprocess
import sys
from pathlib import Path


class WheelsError(RuntimeError):
    """Wheels could not be installed; the message has the reason."""


def install(wheels: Path, site: Path) -> None:
    """Install all wheels of a folder to ``site``, without network access and dependencies.

    Nothing happens if wheels with the same names are installed already.

    Raises:
        WheelsError: If the folder has no wheel, or pip fails.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise WheelsError(f"--wheels {wheels}: contains no file that ends in .whl")
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
