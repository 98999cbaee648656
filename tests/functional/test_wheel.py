"""The wheel holds megatron_eopt alone, and works where nothing of this checkout is."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

from tests.functional.script import ROOT, STOCK_SCRIPT, TINY, losses
from tests.harness.programs import finished


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    # no ignored files, so that leftovers of this checkout cannot slip in
    listed = "git ls-files -z --cached --others --exclude-standard | tar c --null -T - "
    copied = f"{listed} --ignore-failed-read | tar x -C {source}"
    subprocess.run(copied, shell=True, check=True, cwd=ROOT, capture_output=True)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    subprocess.run([*command, str(source)], check=True, capture_output=True, timeout=120)
    return next(out.glob("*.whl"))


def test_it_holds_one_package_and_all_of_it(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"megatron_eopt"}
    package = ROOT / "megatron_eopt"
    files = [p for p in package.rglob("*") if p.suffix in (".py", ".yaml") or p.name == "py.typed"]
    files += [package / path.relative_to(ROOT) for path in ROOT.glob("arguments/*.py")]
    assert {path.relative_to(ROOT).as_posix() for path in files} <= names


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """Programs of an environment with the wheel, which finds all other packages among ours."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    # does not read the file there that makes this checkout importable
    (packages / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    subprocess.run([*pip, "--quiet", "--no-index", "--no-deps", str(wheel)], check=True)
    return folder / "bin"


def run(*command: object, folder: Path, warnings: str = "ignore") -> str:
    """Run a command in a folder outside of the checkout; return its output."""
    done = finished(*command, folder=folder, PYTHONPATH="", PYTHONWARNINGS=warnings)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert warnings == "ignore" or not done.stderr
    return done.stdout


def test_the_command_and_the_version_are_the_wheels(installed, tmp_path):
    # what the packages that it imports say is not shown
    said = run(installed / "megatron-eopt", "--help", folder=tmp_path, warnings="default")
    assert all(f"\n    {word} " in said for word in ("plan", "sweep", "explain", "recipe"))
    code = "import importlib.metadata as m, megatron_eopt.arguments as a; "
    code += "print(a.__file__, m.version('megatron-eopt'))"
    place, version = run(installed / "python", "-c", code, folder=tmp_path).split()
    assert Path(place).is_relative_to(installed.parent)
    assert version == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\n## {version} " in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.long
def test_the_launcher_trains(installed, tmp_path):
    shutil.copy(STOCK_SCRIPT, tmp_path / "pretrain.py")
    command = [installed / "python", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "1", "-m", "megatron_eopt.launch", "pretrain.py", *TINY]
    flags = "--train-iters 2 --optimizer muon --use-distributed-optimizer".split()
    assert len(losses(run(*command, *flags, folder=tmp_path))) == 2
