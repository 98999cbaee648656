"""Run a script that was written for Megatron-LM, unchanged, with our optimizers and flags.

    torchrun --nproc-per-node 8 -m megatron_eopt.launch pretrain_gpt.py ARGUMENTS...
    torchrun --nproc-per-node 8 -m megatron_eopt.launch -m package.pretrain ARGUMENTS...

The script runs as if Python had started it: with its arguments, its folder on the module path, as
the main module. Its trainer takes the flags of megatron-eopt besides its own, and without a GPU
the processes run on the CPU and talk over gloo (MEGATRON_EOPT_DEVICE=cpu|cuda chooses by hand).
Flags that are not given mean what they mean to Megatron-LM; --optimizer-defaults recommended
asks for the values that are recommended here.
"""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

_PROGRAM = "python -m megatron_eopt.launch"

_TARGET = "MEGATRON_EOPT_LAUNCHED"
"""Environment variable that tells child processes what was launched: script:PATH or module:NAME."""


class _MainSpec(ModuleSpec):
    """Says that the main module is imported by importing this launcher.

    Processes that multiprocessing starts afresh import their parent's main module first, by the
    name that its ``__spec__`` has. The script must not be imported there before Megatron's modules
    have been prepared.
    """

    def __init__(self, package: str) -> None:
        super().__init__("megatron_eopt.launch", None)
        self._package = package

    @property
    def parent(self) -> str:
        """The package that relative imports of the launched module refer to."""
        return self._package


class _Program(NamedTuple):
    """Code to run as the main module, and what the module's namespace has from the start."""

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
        exec(self.code, namespace)  # what python itself does with a script


def _module(name: str) -> _Program:
    """Return the program of a module, for a package that of its ``__main__``."""
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
        raise ImportError(f"{_PROGRAM} -m {name}: there is no Python module of this name")
    return _Program(code, spec.origin or name, loader, spec.parent or "")


def _prepare(target: str) -> _Program:
    """Return the program that ``target`` names, once Megatron's modules are ready for it."""
    # Not before now: the module path decides which Megatron is imported.
    from megatron_eopt import cpu, megatron_lm

    cpu.enable_if_chosen()
    megatron_lm.install()
    kind, _, place = target.partition(":")
    if kind == "module":
        return _module(place)
    loader = SourceFileLoader("__main__", place)
    return _Program(loader.source_to_code(loader.get_data(place), place), place, loader, None)


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the launcher's own arguments and those of what it launches."""
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        usage=f"{_PROGRAM} [-h] (SCRIPT | -m MODULE) [ARGUMENTS...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("script", nargs="?", metavar="SCRIPT", help="path of a Python file")
    module_help = "run a module of this name instead"
    target.add_argument("-m", dest="module", metavar="MODULE", help=module_help)
    own = 2 if arguments[:1] == ["-m"] else 1
    options = parser.parse_args(arguments[:own])
    if options.script is not None and not Path(options.script).is_file():
        parser.error(
            f"there is no script {options.script!r} (in the folder {os.getcwd()}); give the path "
            "of a Python file, or -m and the name of a module"
        )
    return options, list(arguments[own:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line (None: the process's) names, as the main module of this process.

    Raises:
        SystemExit: If the command line names nothing that could be run.
        ImportError: If megatron-core lacks a name that would be replaced.
    """
    options, rest = _parse(sys.argv[1:] if arguments is None else arguments)
    sys.argv[:] = [options.script or options.module, *rest]
    target = f"module:{options.module}"
    if options.script is not None:
        target = f"script:{os.path.abspath(options.script)}"
        if not sys.flags.safe_path:
            sys.path[0] = str(Path(options.script).resolve().parent)
    # for the processes that this one starts, see _MainSpec
    os.environ[_TARGET] = target
    program = _prepare(target)
    if options.module is not None:
        sys.argv[0] = program.file
    module = sys.modules["__main__"] = ModuleType("__main__")
    program.run(vars(module))


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    # a child process imports what its parent runs, as multiprocessing asks for
    _program = _prepare(os.environ[_TARGET])
    sys.argv[0] = _program.file
    _program.run(globals())
