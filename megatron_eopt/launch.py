"""Run a script that was written for Megatron-LM, unchanged, with our optimizers and flags.

    torchrun --nproc-per-node 8 -m megatron_eopt.launch pretrain_gpt.py ARGUMENTS...
    torchrun --nproc-per-node 8 -m megatron_eopt.launch -m package.pretrain ARGUMENTS...

The script runs as if Python had started it: as the main module, with its arguments and its folder
on the module path. Its trainer also accepts the flags of megatron-eopt. Without a GPU, the
processes run on the CPU and communicate over gloo (MEGATRON_EOPT_DEVICE=cpu|cuda overrides this).
Flags that you leave out keep Megatron-LM's defaults; --optimizer-defaults recommended selects the
defaults that megatron-eopt recommends. A wrong setting ends the run with one sentence;
MEGATRON_EOPT_TRACEBACK=1 adds where it was found.
"""

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from megatron_eopt.base.quiet import ignore_useless_warnings, report_errors_once

_PROGRAM = "python -m megatron_eopt.launch"

_TARGET = "MEGATRON_EOPT_LAUNCHED"
"""Environment variable that names the program for child processes: script:PATH or module:NAME."""


_STAND_IN = "megatron_eopt.cpu"
"""What acts as a GPU where there is none."""


class _MainSpec(ModuleSpec):
    """The main module's ``__spec__``, which names this launcher instead of the launched script.

    A child process of multiprocessing imports it first, which also prepares Megatron's modules.
    """

    def __init__(self, package: str) -> None:
        super().__init__("megatron_eopt.launch", None)
        self._package = package

    @property
    def parent(self) -> str:
        """The package that relative imports of the launched module refer to."""
        return self._package


class _Program(NamedTuple):
    """Code to run as the main module, with the values that its namespace starts with."""

    code: CodeType
    file: str
    loader: Any
    package: str | None

    def run(self, namespace: dict[str, Any]) -> None:
        namespace.update(
            __file__=self.file,
            __cached__=None,
            __loader__=self.loader,
            __package__=self.package,
            __spec__=_MainSpec(self.package or ""),
        )
        exec(self.code, namespace)  # as Python runs a script


def _module(name: str) -> _Program:
    """Return the program of a module; for a package, that of its ``__main__``."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    if spec is not None and spec.submodule_search_locations is not None:
        return _module(f"{name}.__main__")
    loader: Any = None if spec is None else spec.loader
    code = None if loader is None else loader.get_code(name)
    if spec is None or code is None:
        raise ImportError(f"{_PROGRAM} -m {name}: found no Python module of this name")
    return _Program(code, spec.origin or name, loader, spec.parent or "")


def _prepare(target: str) -> _Program:
    """Prepare Megatron's modules, then return the program that ``target`` names."""
    ignore_useless_warnings()
    report_errors_once()
    # imported late, because the module path decides which Megatron these find
    from megatron_eopt import megatron_lm

    if importlib.util.find_spec(_STAND_IN) is not None:
        importlib.import_module(_STAND_IN).enable_if_chosen()
    megatron_lm.install()
    kind, _, name = target.partition(":")
    if kind == "module":
        return _module(name)
    loader = SourceFileLoader("__main__", name)
    return _Program(loader.source_to_code(loader.get_data(name), name), name, loader, None)


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the command line into the launcher's arguments and those of the program."""
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        usage=f"{_PROGRAM} [-h] (SCRIPT | -m MODULE) [ARGUMENTS...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("script", nargs="?", metavar="SCRIPT", help="path of a Python file")
    module_help = "name of a module to run instead"
    target.add_argument("-m", dest="module", metavar="MODULE", help=module_help)
    # the rest belongs to the script, whose flags may look like the launcher's
    count = 2 if arguments[:1] == ["-m"] else 1
    options = parser.parse_args(arguments[:count])
    if options.script is not None and not Path(options.script).is_file():
        parser.error(
            f"found no script {options.script!r} (current folder: {os.getcwd()}); pass the path "
            "of a Python file, or -m and the name of a module"
        )
    return options, list(arguments[count:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program that ``arguments`` (default: ``sys.argv``) name as the main module.

    Raises:
        SystemExit: If the arguments name no script or module.
        ImportError: If the module is not found, or megatron-core lacks a name to replace.
    """
    options, rest = _parse(sys.argv[1:] if arguments is None else arguments)
    sys.argv[:] = [options.script or options.module, *rest]
    target = f"module:{options.module}"
    if options.script is not None:
        target = f"script:{os.path.abspath(options.script)}"
        if not sys.flags.safe_path:
            # as Python does for a script; with -P (safe_path) it adds no folder
            sys.path[0] = str(Path(options.script).resolve().parent)
    # child processes read it, see _MainSpec
    os.environ[_TARGET] = target
    program = _prepare(target)
    if options.module is not None:
        sys.argv[0] = program.file
    # pickle finds the script's classes under this name
    module = sys.modules["__main__"] = ModuleType("__main__")
    program.run(vars(module))


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    # multiprocessing imports the main module under this name in a child process
    _program = _prepare(os.environ[_TARGET])
    sys.argv[0] = _program.file
    _program.run(globals())
