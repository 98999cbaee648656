"""Put faults into the Triton kernels, and tell whether their self-check or a test notices each.

    python -m scripts.kernel_faults                      # 120 faults, the same each time
    python -m scripts.kernel_faults --count 1000         # all of them
    python -m scripts.kernel_faults products --seed 1    # of the modules with this in their name

A fault changes one operator, mask, bound or offset of a kernel or its launch. The sample has one of
each kind for each function, and draws the rest. Triton's interpreter runs the self-check; the
nearest tests run only if it misses the fault. Nothing is changed here. The result is a Markdown
table.
"""

import argparse
import ast
import contextlib
import copy
import multiprocessing
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import megatron_eopt
from megatron_eopt.base.kernels import Family
from megatron_eopt.layouts import redistribution
from megatron_eopt.math import norms, passes, products
from tests.harness.kernels import checked_kernels

ROOT = Path(megatron_eopt.__file__).parent
_UNIT = "tests/unit"
_OFFSETS = f"{_UNIT}/math/test_offsets.py"
_WITHIN = f"{_UNIT}/math/test_kernel_checks.py::test_kernels_stay_within_and_say_what_is_true"
TESTS = {
    # those of quack and of whole iterations are of other code, and long
    "math/triton_products": (
        products.KERNELS,
        f"{_UNIT}/math/test_products.py -k 'offsets or within or tile or symm or join or inside'",
    ),
    "math/triton_passes": (passes.KERNELS, f"{_UNIT}/math/test_passes.py"),
    "math/triton_normalize": (
        norms.KERNELS,
        f"{_UNIT}/math/test_normalization.py -k 'kernels or offsets or within'",
    ),
    "layouts/block_copies": (redistribution.KERNELS, f"{_UNIT}/layouts/test_block_copies.py"),
}
"""The modules, what checks them, and the nearest tests beside those of all kernels."""

_PAIRS = (
    (ast.Add, ast.Sub),
    (ast.FloorDiv, ast.Mod),
    (ast.BitAnd, ast.BitOr),
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
)
_SWAPPED: dict[type, Any] = {ast.Mult: ast.Add, ast.Div: ast.Mult, **dict(_PAIRS)}
_SWAPPED |= {second: first for first, second in _PAIRS}
_BOUNDS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_OF_ONE = ("abs", "trans", "sqrt", "sqrt_rn", "exp2")
_LIMIT = 300  # seconds, after which a fault is noticed because it hangs


class Fault(NamedTuple):
    """A part of a module and what it becomes."""

    module: str
    function: str
    kind: str
    node: ast.expr | ast.stmt
    new: str

    def applied(self, text: str) -> str:
        """Return the module's text with the fault."""
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        node = self.node
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        return text[:first] + self.new + text[last:]

    def __str__(self) -> str:
        old = " ".join(ast.unparse(self.node).split())
        return f"`{old}` -> `{self.new}`"


def changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the kind of each fault in one part of a program, and the text that this becomes."""
    match node:
        case ast.BinOp(left, op, right):
            if type(op) in _SWAPPED:
                yield "operator", _with(node, op=_SWAPPED[type(op)]())
            if isinstance(op, ast.BitAnd | ast.BitOr):
                yield from (("mask", f"({ast.unparse(side)})") for side in (left, right))
            elif isinstance(op, ast.Add | ast.Mult):
                yield from (("offset", f"({ast.unparse(side)})") for side in (left, right))
        case ast.AugAssign(op=op) if type(op) in _SWAPPED:
            yield "operator", _with(node, op=_SWAPPED[type(op)]())[1:-1]
        case ast.Compare(ops=[op]):
            kind = "bound" if isinstance(op, _BOUNDS) else "operator"
            yield kind, _with(node, ops=[_SWAPPED[type(op)]()])
        case ast.UnaryOp(operand=operand):
            yield "operator", ast.unparse(operand)
        case ast.IfExp():
            yield "operator", _with(node, body=node.orelse, orelse=node.body)
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield "bound", str(value + 1)
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=args, keywords=keywords):
            for word in keywords:
                if word.arg in ("mask", "other", "propagate_nan"):
                    rest = [it for it in keywords if it is not word]
                    yield "mask", _with(node, keywords=rest)[1:-1]
            if name == "to" and "int64" in ast.unparse(args[0]):
                yield "offset", ast.unparse(value)
            elif name in _OF_ONE:
                yield "operator", ast.unparse(args[0])
            elif name in ("minimum", "maximum"):
                yield from (("bound", ast.unparse(side)) for side in args)
            elif name == "where":
                yield from (("operator", ast.unparse(side)) for side in args[1:])


def _with(node: ast.AST, **fields: Any) -> str:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return f"({ast.unparse(changed)})"


def faults(module: str) -> Iterator[Fault]:
    """Yield all faults of a module's functions."""
    for function in ast.parse((ROOT / f"{module}.py").read_text()).body:
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                for node in _parts(statement):
                    for kind, new in changes(node):
                        yield Fault(module, function.name, kind, node, new)


def _parts(node: ast.AST) -> Iterator[Any]:
    """Yield parts of a program, but no types and none of the options of a launch."""
    yield node
    for part in ast.iter_child_nodes(node):
        is_option = isinstance(part, ast.keyword) and part.arg not in ("mask", "other")
        if not (is_option or (isinstance(node, ast.AnnAssign) and part is node.annotation)):
            yield from _parts(part)


def sample(every: list[Fault], count: int, seed: int) -> list[Fault]:
    """Return one fault of each kind for each function, and others, in the order of the text."""
    shuffled = random.Random(seed).sample(every, len(every))
    firsts = {(it.module, it.function, it.kind): it for it in reversed(shuffled)}
    chosen = [*firsts.values()]
    chosen += [it for it in shuffled if it not in chosen][: max(count - len(chosen), 0)]
    return [it for it in every if it in chosen]


def by_check(family: Family) -> bool:
    """Return whether the self-check finds a fault."""
    with checked_kernels():
        return not family.work_on(torch.device("cpu"))


def by_tests(module: str, tests: str) -> bool:
    """Return whether one of these tests fails, or one of all kernels."""
    options = ["-x", "-q", "-p", "no:cacheprovider"]
    of_all = (_OFFSETS, f"{_WITHIN}[{module.replace('/', '.')}]")
    return pytest.main([*options, *of_all, *shlex.split(tests)]) != pytest.ExitCode.OK


def _child(package: str, folder: str, function: Callable[..., bool], *args: Any) -> None:
    """Import the changed module in place of its like, and exit with 1 if the fault is noticed."""
    with Path(folder, "log").open("a") as log, contextlib.redirect_stdout(log):
        os.dup2(log.fileno(), 2)
        sys.modules[package].__path__.insert(0, folder)
        os._exit(int(function(*args)))


def is_noticed(fault: Fault, folder: str, function: Callable[..., bool], *args: Any) -> bool:
    """Return whether a fork of this process that has the fault fails, dies or hangs."""
    package = f"megatron_eopt.{fault.module.split('/')[0]}"
    given = (package, folder, function, *args)
    child = multiprocessing.get_context("fork").Process(target=_child, args=given)
    child.start()
    child.join(_LIMIT)
    if child.is_alive():
        child.kill()
        child.join()
    return child.exitcode != 0


def tried(fault: Fault) -> str:
    """Return what notices a fault."""
    with tempfile.TemporaryDirectory() as folder:
        text = (ROOT / f"{fault.module}.py").read_text()
        Path(folder, f"{fault.module.split('/')[1]}.py").write_text(fault.applied(text))
        family, tests = TESTS[fault.module]
        if is_noticed(fault, folder, by_check, family):
            return "self-check"
        return "tests" if is_noticed(fault, folder, by_tests, fault.module, tests) else "not"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.kernel_faults")
    parser.add_argument("modules", nargs="*", default=[""], help=f"of {', '.join(TESTS)}")
    parser.add_argument("--count", type=int, default=120, help="faults to try")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    modules = [name for name in TESTS if any(part in name for part in given.modules)]
    every = [fault for module in modules for fault in faults(module)]
    for fault in {fault.module: fault for fault in every}.values():
        if tried(fault._replace(new=f"({ast.unparse(fault.node)})")) != "not":
            sys.exit(f"the check or the tests of {fault.module} fail without a fault")
    print(
        "| kernel | line | kind | fault | noticed by | s |\n|---|---|---|---|---|---|", flush=True
    )
    found: list[str] = []
    for fault in sample(every, given.count, given.seed):
        start = time.monotonic()
        found.append(tried(fault))
        cells = (f"`{fault.function}`", fault.node.lineno, fault.kind, fault, found[-1])
        row = " | ".join(str(cell).replace("|", "\\|") for cell in cells)
        print(f"| {row} | {time.monotonic() - start:.0f} |", flush=True)
    counts = ", ".join(f"{name}: {found.count(name)}" for name in ("self-check", "tests", "not"))
    print(f"\n{len(found)} of {len(every)} faults. {counts}.")


if __name__ == "__main__":
    main()
