"""Change conditions, bounds and results in code that decides, and tell what no test notices.

    pip install "mutmut==3.8.1"                  # the extra "mutation"
    python -m scripts.mutation                   # all modules
    python -m scripts.mutation base/agreement    # one

Each change is tried alone, in a fork of a process that has imported everything, with the tests that
call the changed function. Nothing is changed here: mutmut works in a copy, ``mutants``. The result
is a row of the table in tests/mutation.md for each module, and the changes that go unnoticed.
"""

import multiprocessing
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import libcst as cst
import pytest
from mutmut import __main__ as mutmut
from mutmut.configuration import config
from mutmut.mutation import mutators
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.state import state
from mutmut.stats import status_by_exit_code

TESTS = {
    "base/agreement": "base/test_agreement.py base/test_subgroups.py",
    "layouts/assignment": "layouts/test_assignment.py",
    "layouts/boxes": "layouts/test_boxes.py",
    "checkpoint/rule": "checkpoint/test_rule.py",
    "checkpoint/catalogue": "checkpoint/test_catalogue.py",
    "checkpoint/guard/files": "checkpoint/test_checked_files.py checkpoint/test_fingerprints.py",
    "optimizers/host_memory": "optimizers/test_host_memory.py",
    "routing/routes": "routing/test_routes.py",
    "routing/groups": "routing/test_routes.py routing/test_grouping_properties.py",
    "routing/parameters": "routing/test_routes.py routing/test_cut_dimension.py",
    "layouts/redistribution:_check_agreement": (
        "layouts/test_redistribution.py::test_the_ranks_with_another_plan_than_most_are_named"
    ),
}
"""The modules, and which of ``tests/unit`` may notice a change."""


def operands(node: cst.BooleanOperation) -> Iterator[cst.BaseExpression]:
    """Leave out one part of a condition."""
    yield from (node.left, node.right)


def no_result(node: cst.Return) -> Iterator[cst.Return]:
    """Return None in place of a result."""
    if node.value is not None:
        yield node.with_changes(value=cst.Name("None"))


CHANGES = [
    (cst.BooleanOperation, operands),
    (cst.Return, no_result),
    *((kind, mutators.operator_if_exp) for kind in (cst.If, cst.CompIf, cst.IfExp)),
    (cst.BaseNumber, mutators.operator_number),
    (cst.Name, mutators.operator_name),
    (cst.UnaryOperation, mutators.operator_remove_unary_ops),
    (cst.CSTNode, mutators.operator_keywords),
    (cst.CSTNode, mutators.operator_swap_op),
]
"""What is changed: no texts of messages, and no arguments."""


class _Undecorated(cst.CSTTransformer):
    """Writes decorators as calls after the function, because mutmut changes no others."""

    def leave_FunctionDef(self, _: Any, node: cst.FunctionDef) -> Any:  # noqa: N802
        calls = [cst.Module([]).code_for_node(d.decorator) for d in node.decorators]
        if len(calls) != 1 or calls[0] not in ("property", "cached_property", "contextmanager"):
            return node
        name = node.name.value
        call = cst.parse_statement(f"{name} = {calls[0]}({name})")
        return cst.FlattenSentinel([node.with_changes(decorators=[]), call])


class _Recorded:
    """Lets a worker process tell which functions its part of a test has called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__qualname__ = function.__qualname__

    def __call__(self, *args: Any) -> tuple[Any, set[str]]:
        state()._stats.clear()
        return self.function(*args), set(state()._stats)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Record what worker processes call while tests are chosen; let none hang for long."""
    from megatron_eopt.testing.pool import Pool  # of the copy

    plain = Pool.run

    def run(pool: Pool, function: Callable[..., Any], args: Any, timeout: float, *more: Any) -> Any:
        told = plain(pool, _Recorded(function), args, min(timeout, 15), *more)
        state()._stats.update(*(called for _, called in told))
        return [result for result, _ in told]

    with mock.patch.object(Pool, "run", run):
        return (yield)


def _prepare() -> None:
    """Let mutmut make these changes, and follow tests into worker processes."""
    mutators.mutation_operators[:] = CHANGES
    plain = mutmut.mutate_file_contents

    def mutated(name: str, code: str, *more: Any) -> Any:
        return plain(name, cst.parse_module(code).visit(_Undecorated()).code, *more)

    mutmut.mutate_file_contents = mutated
    # workers are forked from the process that has the change, not from a server
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda kind=None: context(
        "fork" if kind == "forkserver" else kind
    )


def main(modules: list[str]) -> None:
    """Try all changes of a module, or of several one after the other."""
    if len(modules) != 1:
        for module in modules or TESTS:
            subprocess.run([sys.executable, "-m", "scripts.mutation", module], check=True)
        return
    module, _, function = modules[0].partition(":")
    _prepare()
    config().only_mutate[:] = [f"megatron_eopt/{module}.py"]
    tests = [f"tests/unit/{place}" for place in TESTS[modules[0]].split()]
    config().pytest_add_cli_args_test_selection[:] = tests
    shutil.rmtree("mutants", ignore_errors=True)
    start = time.monotonic()
    names = [f"*{function}__mutmut_*"] if function else []
    mutmut.cli(["run", "--max-children", "1", *names], standalone_mode=False)
    (file,) = mutmut.walk_mutatable_files()
    found = mutmut.SourceFileMutationData(path=file)
    found.load()
    codes = {name: code for name, code in found.exit_code_by_key.items() if function in name}
    status = {name: status_by_exit_code[code] for name, code in codes.items()}
    missed = [name for name, its in status.items() if its not in ("killed", "timeout")]
    for name in missed:
        print(f"\n{name}: {status[name]}\n{get_diff_for_mutant(name, path=file)}")
    minutes = (time.monotonic() - start) / 60
    print(f"\n| `{modules[0]}` | {len(status)} | {len(status) - len(missed)} | {minutes:.1f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
