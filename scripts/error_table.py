"""Write docs/reference/errors.md: every configuration error of the package, taken from its source.

python scripts/error_table.py          writes the page
python scripts/error_table.py --check  exits with 1 if the page is not what the source says
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "errors.md"
KINDS = ("ConfigurationError", "ConfigurationTypeError", "CheckpointError")
HEAD = """# Configuration errors

Each of these errors stands for a run that would train something other than its settings say, or
that would lose state. They are raised on every rank, with the argument, its value, what is wrong
and what to do. Parts in braces depend on the run. `python scripts/error_table.py` writes this page.

| Where | Argument | What is wrong | What to do |
|---|---|---|---|
"""


def text_of(node: ast.expr, known: dict[str, ast.expr]) -> str:
    """Return what an expression says, with the parts that depend on a run in braces."""
    if isinstance(node, ast.Name) and node.id in known:
        return text_of(known[node.id], {})
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, known) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, known) + text_of(node.right, known)
    if isinstance(node, ast.FormattedValue):
        node = node.value
    names = [item for item in ast.walk(node) if isinstance(item, ast.Name | ast.Attribute)]
    last = names[0] if names else None
    name = last.attr if isinstance(last, ast.Attribute) else getattr(last, "id", "value")
    return f"{{{name}}}"


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


def errors(path: Path) -> Iterator[tuple[str, str, str]]:
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
        argument, _, rule, way_out = (text_of(item, known) for item in node.args)
        yield argument, rule, way_out


def page() -> str:
    """Return the whole page."""
    files = sorted((ROOT / "megatron_eopt").rglob("*.py")) + sorted(
        (ROOT / "arguments").glob("*.py")
    )
    lines = []
    for path in files:
        place = path.relative_to(ROOT).as_posix().removeprefix("megatron_eopt/")
        if path.parent.is_symlink() or place == "base/errors.py":
            continue
        for cells in errors(path):
            texts = [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]
            lines.append(f"| {place} | `{texts[0]}` | {texts[1]} | {texts[2]} |")
    lines = sorted(set(lines))
    bounds = "Bounds of numbers and choices of names are checked besides, for values in use.\n"
    return HEAD + "\n".join(lines) + f"\n\n{len(lines)} errors. {bounds}"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text() != page())
    PAGE.write_text(page())
