"""The wheel holds megatron_eopt and nothing else at top level."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory) -> list[str]:
    # Only tracked files, so that leftovers of this checkout cannot slip in.
    source = tmp_path_factory.mktemp("source")
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, tracked.stdout.decode().split("\0")):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to((ROOT / name).readlink())
        elif (ROOT / name).exists():
            target.write_bytes((ROOT / name).read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    subprocess.run([*command, str(source)], check=True, capture_output=True, timeout=120)
    (wheel,) = out.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_one_top_level_package(wheel_names):
    top = {name.split("/")[0] for name in wheel_names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"megatron_eopt"}


def test_arguments_are_installed_inside_the_package(wheel_names):
    assert "megatron_eopt/arguments/__init__.py" in wheel_names
    assert "megatron_eopt/py.typed" in wheel_names
    assert sum(name.startswith("megatron_eopt/recipes/") for name in wheel_names) == 11


def test_every_module_is_installed(wheel_names):
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "megatron_eopt").rglob("*.py")}
    modules |= {f"megatron_eopt/arguments/{p.name}" for p in (ROOT / "arguments").glob("*.py")}
    assert modules <= set(wheel_names)
