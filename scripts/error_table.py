"""Makes docs/reference/errors.md: every configuration error of the package, from its source.

``python -m scripts.reference_pages`` writes the page.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("ConfigurationError", "ConfigurationTypeError", "CheckpointError")
HEAD = """# Configuration errors

These {count} errors stop a run that would not train as configured, or would lose state. Each
message has the setting, its value, what is wrong and what to do, on every rank. Most are raised
when the optimizer is built, and a few when a checkpoint is saved or loaded.

Search for the setting in your message. A word in braces stands for a value of your run. [Fix an
error](../how_to/troubleshooting.md) explains frequent ones. Not listed are values out of bounds and
unknown names, whose errors say the bounds or the nearest names.
"""
AREAS = {
    "Flags and settings": ("arguments/", "config/", "wrappers/config"),
    "Megatron's trainer": ("megatron_lm/",),
    "torch FSDP2 and Megatron-FSDP": (
        *("fsdp2/dtensors.py", "fsdp2/build.py", "wrappers/megatron_fsdp.py"),
        *("layouts/dtensor.py", "contrib/megatron_fsdp_v2.py", "contrib/units.py"),
    ),
    "Parameters, overrides and splits": ("routing/", "matrices/"),
    "Building and stepping the optimizer": (
        *("wrappers/", "optimizers/", "storage/", "layouts/", "base/place.py"),
        *("megatron_core/", "contrib/"),
    ),
    "Orthogonalization and its kernels": ("math/",),
    "QK-clip": ("qk_clip/",),
    "Checkpoints": (
        *("checkpoint/", "checkpoints.py", "state/", "guard/", "fsdp2/optimizer.py"),
        "tools/explain.py",
    ),
    "Running on a CPU": ("cpu/",),
    "The command megatron-eopt": ("tools/",),
}
"""Headings, and how the names of files begin whose errors come below them; the first one counts."""

ELSEWHERE = "Others"
COLUMNS = "| Setting | What is wrong | What to do |\n|---|---|---|"


def text_of(node: ast.expr, known: dict[str, ast.expr]) -> str:
    """Return what an expression says, with the parts that depend on a run in braces."""
    if isinstance(node, ast.Name) and node.id in known:
        return text_of(known[node.id], {name: known[name] for name in known if name.isupper()})
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "did_you_mean":
        return text_of(node.args[2], known)  # what is said without similar names
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, known) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, known) + text_of(node.right, known)
    if isinstance(node, ast.FormattedValue):
        name = getattr(node.value, "attr", getattr(node.value, "id", ""))
        if name.isupper() and name in known:
            return text_of(known[name], known)
        node = node.value
    return f"{{{name_of(node)}}}"


def name_of(node: ast.expr) -> str:
    """Return what an expression is about: ``shape`` for ``tuple(param.shape)``."""
    match node:
        case ast.Call(func=ast.Name(), args=[*_, inner]):
            return name_of(inner)
        case ast.Call(func=ast.Attribute(value=ast.Constant()), args=[inner]):
            return name_of(inner)  # ", ".join(names)
        case ast.Call(func=ast.Attribute(value=ast.Name("self"))):
            pass
        case ast.Call(func=ast.Attribute(value=inner)) | ast.Attribute(inner, "__name__"):
            return name_of(inner)
    names = [item for item in ast.walk(node) if isinstance(item, ast.Name | ast.Attribute)]
    last = names[0] if names else None
    return last.attr if isinstance(last, ast.Attribute) else getattr(last, "id", "value")


def assignments(function: ast.AST, line: int) -> dict[str, ast.expr]:
    """Return what names were last given above a line of a function."""
    found: dict[str, ast.expr] = {}
    nodes = (n for n in ast.walk(function) if isinstance(n, ast.Assign) and n.lineno < line)
    for node in sorted(nodes, key=lambda n: n.lineno):
        (target,) = node.targets[:1]
        if isinstance(target, ast.Name):
            found[target.id] = node.value
        elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = zip(target.elts, node.value.elts, strict=True)
            found |= {name.id: value for name, value in pairs if isinstance(name, ast.Name)}
    return found


def constants(files: Iterable[Path]) -> dict[str, ast.expr]:
    """Return the texts that are constants of some module, by their names."""
    nodes = (node for path in files for node in ast.parse(path.read_text()).body)
    return {
        node.targets[0].id: node.value
        for node in nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant | ast.JoinedStr)
    }


def errors(path: Path, texts: dict[str, ast.expr]) -> Iterator[tuple[str, str, str]]:
    """Yield argument, rule and way out of each error that a file makes."""
    tree = ast.parse(path.read_text())
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id not in KINDS or len(node.args) != 4:
            continue
        inside = [f for f in functions if f.lineno <= node.lineno <= (f.end_lineno or f.lineno)]
        known = assignments(max(inside, key=lambda f: f.lineno), node.lineno) if inside else {}
        argument, _, rule, hint = (text_of(item, texts | known) for item in node.args)
        if not re.fullmatch(r"\{\w+\}", hint):  # else all of it depends on the run
            told = "(in the message)" if re.fullmatch(r"\{\w+\}", rule) else rule
            yield argument, told, hint


def area_of(place: str) -> str:
    """Return the heading below which errors of a file are listed."""
    found = (area for area, prefixes in AREAS.items() if place.startswith(prefixes))
    return next(found, ELSEWHERE)


def page() -> str:
    """Return the whole page."""
    rows: dict[str, set[str]] = {area: set() for area in (*AREAS, ELSEWHERE)}
    files = [path for path in (ROOT / "megatron_eopt").rglob("*.py") if path.name != "errors.py"]
    texts = constants(files)
    for path in files:
        place = path.relative_to(ROOT).as_posix().removeprefix("megatron_eopt/")
        for error in errors(path, texts):
            cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in error]
            rows[area_of(place)].add(f"| `{cells[0]}` | {cells[1]} | {cells[2]} |")
    parts = [HEAD.replace("{count}", str(sum(map(len, rows.values()))))]
    for area, found in rows.items():
        if found:
            parts.append("\n".join([f"## {area}", "", COLUMNS, *sorted(found), ""]))
    return "\n".join(parts)
