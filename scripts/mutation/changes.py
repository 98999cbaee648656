"""All changes that the sample is drawn from.

What is changed is inside functions: conditions, bounds, operators, numbers and results. Annotations
and texts stay, and so does what a function raises or logs.
"""

import ast
import copy
import difflib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from scripts.mutation.lines import PACKAGE, ROOT

OUTSIDE = ("tools", "testing", "cpu", "contrib")
"""Rooms that are not of the core."""
TOP = "top"
"""The room of the modules that are in no folder."""

_KERNELS = "@triton.jit"  # modules with such are tried by scripts/kernel_faults.py
_TEXTS = ("debug", "info", "warning", "error", "exception", "warn")  # calls that take a message

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Div,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}


@dataclass(frozen=True)
class Change:
    """A part of a file, and what it becomes."""

    file: str
    digest: str  # of the file that it was found in
    function: str
    kind: str
    lines: tuple[int, int]  # first and last: a test that executes one of them is tried
    place: tuple[int, int]  # first byte, and the one after the last
    new: str

    @property
    def room(self) -> str:
        """The folder of the package that the file is in."""
        return room_of(self.file)

    @property
    def key(self) -> tuple[str, str]:
        """What tells this change from all others: with the file, it stays the same."""
        return f"{self.file}:{self.place[0]}-{self.place[1]}:{self.new}", self.digest

    def applied(self, text: str) -> str:
        """Return the file's text with the change."""
        old, (first, last) = text.encode(), self.place
        return (old[:first] + self.new.encode() + old[last:]).decode()

    def diff(self, text: str) -> str:
        """Return what the change does to the file's text."""
        lines = text.splitlines(), self.applied(text).splitlines()
        return "\n".join(list(difflib.unified_diff(*lines, n=1, lineterm=""))[2:])


def room_of(file: str) -> str:
    """Return the room that a file of the package is in."""
    parts = Path(file).parts
    return parts[1] if len(parts) > 2 else TOP


def digest_of(text: str) -> str:
    """Return what changes with the text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def core_files(folder: Path = Path(ROOT)) -> dict[str, str]:
    """Return the text of each module of the core, by its path in the repository."""
    paths = sorted((folder / PACKAGE).rglob("*.py"))
    texts = {path.relative_to(folder).as_posix(): path.read_text() for path in paths}
    return {
        file: text
        for file, text in texts.items()
        if room_of(file) not in OUTSIDE and _KERNELS not in text
    }


def changes_of(file: str, text: str) -> list[Change]:
    """Return all changes of a module, in the order of its text."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    digest = digest_of(text)
    found = []
    for node, where in _parts(ast.parse(text), _Where("", (0, 0))):
        if where.function:
            for kind, part, new in _changes(node):
                place = (
                    starts[part.lineno - 1] + part.col_offset,
                    starts[part.end_lineno - 1] + part.end_col_offset,
                )
                lines = (min(where.lines[0], part.lineno), max(where.lines[1], part.end_lineno))
                found.append(Change(file, digest, where.function, kind, lines, place, new))
    unique = {change.key: change for change in found}
    return sorted(unique.values(), key=lambda it: (it.place, it.kind, it.new))


class _Where(NamedTuple):
    """Where a part of a module is."""

    function: str  # the functions and classes around it; "" outside functions
    lines: tuple[int, int]  # of the statement around it, without those inside that


def _parts(node: ast.AST, where: _Where, names: str = "") -> Iterator[tuple[Any, _Where]]:
    """Yield the parts of a module that may be changed.

    ``names`` are the functions and classes around it, also outside functions.
    """
    inside = _header(node, where) if isinstance(node, ast.stmt) else where
    yield node, inside
    match node:
        case ast.FunctionDef(name=name, body=body) | ast.AsyncFunctionDef(name=name, body=body):
            name = f"{names}{name}"
            inside = _Where(name, (body[0].lineno, body[-1].end_lineno or 0))
            for default in (*node.args.defaults, *node.args.kw_defaults):
                if default is not None:
                    yield from _parts(default, inside, f"{name}.")
            for statement in body:
                yield from _parts(statement, inside, f"{name}.")
        case ast.ClassDef(name=name, body=body):
            for statement in body:
                yield from _parts(statement, where, f"{names}{name}.")
        case ast.Lambda(body=inner):
            function = where.function or f"{names}<lambda>"
            yield from _parts(inner, where._replace(function=function), names)
        case ast.AnnAssign(value=value) if value is not None:
            yield from _parts(value, inside, names)
        case ast.Assert(test=test):
            yield from _parts(test, inside, names)
        case ast.Call(func=ast.Attribute(attr=name)) if name in _TEXTS:
            pass
        case ast.Raise() | ast.JoinedStr() | ast.AnnAssign():
            pass
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _parts(child, inside, names)


def _header(node: ast.stmt, where: _Where) -> _Where:
    """Return the lines of a statement, but not those of statements inside it."""
    inner = [it for it in ast.iter_child_nodes(node) if isinstance(it, ast.stmt | ast.match_case)]
    first = [it.pattern.lineno if isinstance(it, ast.match_case) else it.lineno for it in inner]
    last = max(node.lineno, min(first) - 1) if first else (node.end_lineno or node.lineno)
    return where._replace(lines=(node.lineno, last))


def _changes(node: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield the kind of each change of a part, what it replaces, and the text in its place."""
    match node:
        case ast.BoolOp(op=op, values=values):
            for left_out in values:
                rest = [value for value in values if value is not left_out]
                yield "condition left out", node, _with(node, values=rest)
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "and, or", node, _with(node, op=other)
        case ast.Compare(ops=ops):
            for index, old in enumerate(ops):
                swapped = [*ops[:index], _COMPARED[type(old)](), *ops[index + 1 :]]
                yield "comparison", node, _with(node, ops=swapped)
        case ast.BinOp(op=op) if type(op) in _COMPUTED:
            yield "operator", node, _with(node, op=_COMPUTED[type(op)]())
        case ast.AugAssign(op=op) if type(op) in _COMPUTED:
            yield "operator", node, _with(node, op=_COMPUTED[type(op)]())[1:-1]
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            yield "not left out", node, f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield "True, False", node, str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "number", node, repr(value + 1)
        case ast.If(test=test) | ast.IfExp(test=test):
            yield from _decided(test)
        case ast.comprehension(ifs=tests):
            for test in tests:
                yield from _decided(test)
        case ast.Return(value=value) if ast.unparse(value or ast.Constant(None)) != "None":
            yield "no result", value, "None"
        case ast.Break():
            yield "way out of a loop", node, "return"
        case ast.Continue():
            yield "way out of a loop", node, "break"


def _decided(test: ast.expr) -> Iterator[tuple[str, ast.expr, str]]:
    """Let a condition always hold, or never; it is still computed."""
    for op, value, kind in ((ast.Or(), True, "always"), (ast.And(), False, "never")):
        decided = ast.BoolOp(op, [test, ast.Constant(value)])
        yield f"condition {kind} holds", test, f"({ast.unparse(decided)})"


def _with(node: ast.AST, **fields: Any) -> str:
    """Return the text of a part with other fields, which may stand anywhere."""
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return f"({ast.unparse(changed)})"


def all_changes(rooms: Sequence[str] = ()) -> list[Change]:
    """Return all changes of these rooms, or of all."""
    return [
        change
        for file, text in core_files().items()
        if not rooms or room_of(file) in rooms
        for change in changes_of(file, text)
    ]
