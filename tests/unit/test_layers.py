"""Imports go strictly down, and each package is in its place.

The order is that of docs/explanation/how_it_works.md: what a name stands before may import it.
"""

import ast
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from megatron.core.optimizer import OptimizerConfig

from megatron_eopt import EmergingOptimizerConfig

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "megatron_eopt"

ORDER = (
    # what people call
    "__main__",
    "tools",
    "testing",
    "contrib",
    "cpu",
    "launch",
    "megatron_lm",
    "arguments",
    "bridge",
    "megatron_fsdp",
    "emerging_optimizers",
    "muon",
    "extending",
    # what it is made of
    "wrappers",
    "qk_clip",
    "checkpoint",
    "megatron_core",
    # the line: what follows knows torch alone
    "checkpoints",
    "hugging_face",
    "fsdp2",
    "state",
    "optimizers",
    "storage",
    "routing",
    "config",
    "layouts",
    "matrices",
    "math",
    "guard",
    "__init__",
    "base",
)
"""Every package and module at the top, highest first."""

LINE = ORDER.index("checkpoints")
BELOW = frozenset(ORDER[LINE:])
"""The rooms that know Python, numpy and torch alone."""

OUTSIDE = frozenset({"contrib", "cpu", "tools", "testing"})
"""The rooms that no other room names."""

ENTRIES = frozenset({"__main__", "launch"})
"""What starts the command and the CPU back end of outside rooms, where they are there."""

LATE = {
    **{f"math/triton_{kernels}.py": {"triton"} for kernels in ("normalize", "passes", "products")},
    "base/kernel_tables.py": {"triton"},
    "layouts/block_copies.py": {"triton"},
    "optimizers/muon.py": {"emerging_optimizers"},
    "optimizers/adaptive_muon.py": {"emerging_optimizers"},
    "hugging_face.py": {"transformers", "accelerate"},
}
"""Files below the line that are imported late, and the other packages that they know."""

KNOWN = frozenset({"torch", "numpy", PACKAGE})


def source_files() -> dict[str, ast.Module]:
    files = {path.relative_to(ROOT / PACKAGE): path for path in (ROOT / PACKAGE).rglob("*.py")}
    return {place.as_posix(): ast.parse(path.read_text()) for place, path in files.items()}


SOURCES = source_files()


def modules(tree: ast.AST) -> set[str]:
    """Return what is imported, wherever in the file."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def top_of(place: str) -> str:
    return place.split("/")[0].removesuffix(".py")


def imported(tree: ast.AST) -> set[str]:
    """Return which of our packages are imported."""
    ours = [name.split(".") for name in modules(tree) if name.split(".")[0] == PACKAGE]
    return {parts[1] if parts[1:2] and parts[1] in ORDER else "__init__" for parts in ours}


def test_every_package_is_named():
    assert {top_of(place) for place in SOURCES} == set(ORDER)


def test_imports_go_strictly_down():
    for place, tree in SOURCES.items():
        for name in imported(tree) - {top_of(place)}:
            assert ORDER.index(name) > ORDER.index(top_of(place)), f"{place}: {name} is above it"


def named_in(tree: ast.AST) -> set[str]:
    """Return our rooms whose modules are named in strings, such as to import them."""
    texts = [str(n.value) for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    return {t.split(".")[1] for t in texts if t.startswith(f"{PACKAGE}.") and " " not in t}


def test_no_room_names_one_that_is_outside():
    for place in (p for p in SOURCES if top_of(p) not in OUTSIDE | ENTRIES):
        tree = SOURCES[place]
        assert not (imported(tree) | named_in(tree)) & OUTSIDE, place


def test_below_the_line_only_torch_is_known():
    for place in (p for p in SOURCES if top_of(p) in BELOW):
        others = {name.split(".")[0] for name in modules(SOURCES[place])}
        others -= KNOWN | sys.stdlib_module_names
        assert others == LATE.get(place, set()), place


def test_files_that_know_more_are_imported_late():
    """Nobody imports them but each other; names in strings are imported when they are needed."""
    late = {f"{PACKAGE}.{place.removesuffix('.py').replace('/', '.')}" for place in LATE}
    for place in (p for p in SOURCES if top_of(p) in BELOW and p not in LATE):
        found = modules(SOURCES[place])
        assert not late & (found | {name.rpartition(".")[0] for name in found}), place


def test_no_import_of_ours_waits_until_a_function_is_called():
    # the launcher's do: what they import depends on the module path that it sets first
    for place in SOURCES.keys() - {"launch.py"}:
        nodes = ast.walk(SOURCES[place])
        functions = (n for n in nodes if isinstance(n, ast.FunctionDef | ast.Lambda))
        assert not [name for function in functions for name in imported(function)], place


def modules_of(package: str) -> dict[str, set[str]]:
    """Return which modules of a package each of them imports."""
    names = {place for place in SOURCES if top_of(place) == package and place.count("/") == 1}
    paths = {f"{PACKAGE}.{name.removesuffix('.py').replace('/', '.')}": name for name in names}
    return {
        name: {
            paths[path]
            for module in modules(SOURCES[name])
            for path in (module, module.rpartition(".")[0])
            if path in paths
        }
        for name in names
    }


def test_modules_of_a_package_do_not_import_each_other_in_circles():
    for package in ORDER:
        graph = modules_of(package)
        while free := {name for name, needed in graph.items() if not needed & set(graph)}:
            graph = {name: needed for name, needed in graph.items() if name not in free}
        assert not graph, f"a circle among {sorted(graph)}"


GUARD = tuple(f"{PACKAGE}.guard.{name}" for name in ("files", "reads", "saves"))
KNOW_THE_GUARD = {"checkpoints.py", "tools/explain.py"} | {
    f"checkpoint/{name}.py" for name in ("saving", "trainer", "vocabulary", "whole_saves")
}


def test_the_guard_stands_beside_the_rest():
    """It knows files, not optimizers; and only what saves or loads whole checkpoints knows it."""
    inside = {place: tree for place, tree in SOURCES.items() if place.startswith("guard/")}
    assert set().union(*map(imported, inside.values())) <= {"base", "guard"}
    users = {p for p, tree in SOURCES.items() if any(n.startswith(GUARD) for n in modules(tree))}
    assert users - set(inside) == KNOW_THE_GUARD


FIELDS = {
    field.name
    for config in (OptimizerConfig, EmergingOptimizerConfig)
    for field in dataclasses.fields(config)
}
"""Of the configurations that only settings may read."""

READERS = "getattr hasattr setattr vars dataclasses.asdict dataclasses.replace".split()


def raw_reads(tree: ast.AST) -> Iterator[str]:
    """Yield the fields of a configuration that are read, or written, by any name ``config``.

    ``settings.config`` is checked and has all fields.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in FIELDS and _is_config(node.value):
            yield f"line {node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in READERS:
            named = node.args[1] if len(node.args) > 1 else None
            known = not isinstance(named, ast.Constant) or named.value in FIELDS
            if node.args and _is_config(node.args[0]) and known:
                yield f"line {node.lineno}: {ast.unparse(node)}"


def _is_config(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in ("config", "_config") and not ast.unparse(node).endswith("settings.config")


MAY_READ = {"config", "arguments", "cpu", "wrappers/config.py"}
"""Where a configuration is made, or given its meaning; the CPU back end reads the model's."""


def test_only_settings_read_a_raw_configuration():
    for place in (p for p in SOURCES if not {p, top_of(p)} & MAY_READ):
        assert not list(raw_reads(SOURCES[place])), place


def test_the_package_knows_no_script_and_no_benchmark():
    """Scripts know nothing of benchmarks either, which may use them."""
    above = {place: {"benchmarks", "scripts"} for place in SOURCES.values()}
    above |= {ast.parse(p.read_text()): {"benchmarks"} for p in (ROOT / "scripts").rglob("*.py")}
    for tree, folders in above.items():
        assert not {name for name in modules(tree) if name.split(".")[0] in folders}


def test_raw_reads_are_seen():
    read = ("self.config.lr", "getattr(config, 'bf16')", "config.optimizer = 1", "vars(config)")
    for text in read:
        assert list(raw_reads(ast.parse(text))), text
    others = ("self.settings.config.lr", "config.hidden_size", "getattr(config, 'swiglu')")
    for text in others:
        assert not list(raw_reads(ast.parse(text))), text


def test_no_class_has_the_name_of_another():
    classes = Counter(
        node.name
        for tree in SOURCES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in classes.items() if count > 1]


def test_no_folder_of_tests_is_left_out(pytestconfig):
    """What pytest does not look into: by default folders named build or dist."""
    patterns = pytestconfig.getini("norecursedirs")
    places = {path.relative_to(ROOT).parent for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(places) > 20
    left_out = [p for p in places for part in p.parts if any(fnmatch(part, q) for q in patterns)]
    assert not left_out


def test_the_package_works_where_links_do_not():
    """A zip archive, or git without symbolic links, turns links into files with a path in them."""
    assert not [path for path in (ROOT / PACKAGE).rglob("*") if path.is_symlink()]
