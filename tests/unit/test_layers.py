"""Imports between our layers only go down (the order is design's: entry at the top)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "megatron_eopt"

LAYERS = [
    {"base"},
    {"math"},
    {"matrices"},
    {"layouts"},
    {"routing"},
    {"optimizers"},
    {"storage"},
    {"fsdp2", "assembly"},
]
ENTRY = len(LAYERS)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# The CPU back end stands beside the layers: of ours it knows only base.
LEVEL["cpu"] = LEVEL["math"]
KNOW_NO_MEGATRON = {"base", "math", "matrices", "layouts"}
MAY_NAME_MEGATRON = {"base/versions.py"}


def source_files() -> dict[str, ast.Module]:
    files = [*(ROOT / PACKAGE).rglob("*.py")]
    named = {
        path.relative_to(ROOT / PACKAGE).as_posix(): ast.parse(path.read_text()) for path in files
    }
    named |= {
        f"arguments/{path.name}": ast.parse(path.read_text())
        for path in (ROOT / "arguments").glob("*.py")
    }
    return named


def imports(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def level_of(place: str) -> int:
    return LEVEL.get(place.split("/")[0].removesuffix(".py"), ENTRY)


SOURCES = source_files()


@pytest.mark.parametrize("place", SOURCES)
def test_imports_go_down(place):
    for name in imports(SOURCES[place]):
        parts = name.split(".")
        if parts[0] == PACKAGE and len(parts) > 1:
            assert level_of(parts[1]) <= level_of(place), f"{place} imports {name}, a higher layer"


@pytest.mark.parametrize("place", [p for p in SOURCES if p.split("/")[0] in KNOW_NO_MEGATRON])
def test_the_lower_layers_know_no_megatron(place):
    if place not in MAY_NAME_MEGATRON:
        assert not {name for name in imports(SOURCES[place]) if name.split(".")[0] == "megatron"}


@pytest.mark.parametrize("place", SOURCES)
def test_the_command_line_is_imported_by_the_entry_layer_only(place):
    if level_of(place) < ENTRY:
        assert not {n for n in imports(SOURCES[place]) if n.startswith(f"{PACKAGE}.arguments")}


def test_files_stay_short():
    for folder in ("megatron_eopt", "arguments", "scripts", "tests", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            assert path.read_text().count("\n") <= 400, f"{path} has over 400 lines"


def test_every_layer_here_exists():
    folders = {path.name for path in (ROOT / PACKAGE).iterdir() if (path / "__init__.py").exists()}
    assert folders - {"arguments", "checkpoints", "megatron_lm"} <= set(LEVEL)
