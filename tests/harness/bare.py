"""A Python that has torch and some packages, and nothing else of this environment."""

import venv
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement


def bare_python(folder: Path, packages: Iterable[str]) -> Path:
    """Return the interpreter of a new environment, without dependencies of the packages.

    Args:
        folder: Where to create it; it links to the installed packages.
        packages: What it has beside torch and what torch needs.
    """
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    for found in (*_with_dependencies("torch"), *map(distribution, packages)):
        tops = {file.parts[0] for file in found.files or ()}
        # scripts are outside
        for top in tops - {"..", "__pycache__"}:
            link = site / top
            # several packages of torch's share a folder
            if not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))))
    return folder / "bin" / "python"


def _with_dependencies(name: str) -> list[Distribution]:
    found: dict[str, Distribution] = {}
    wanted = [Requirement(name)]
    while wanted:
        item = wanted.pop()
        extras = ({"extra": extra} for extra in ("", *item.extras))
        if item.name in found or not (
            item.marker is None or any(map(item.marker.evaluate, extras))
        ):
            continue
        try:
            found[item.name] = distribution(item.name)
        except PackageNotFoundError:
            continue  # on a machine without GPUs, torch needs less
        wanted += map(Requirement, found[item.name].requires or ())
    return [*found.values()]
