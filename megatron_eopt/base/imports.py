"""Imports Python files that a user names, such as one that registers an optimizer."""

import importlib.util
import sys
from pathlib import Path

from megatron_eopt.base.errors import ConfigurationError


def import_file(path: str) -> None:
    """Import a file as the module of its name; a second call changes nothing.

    Raises:
        ConfigurationError: If there is no such file, or another module has its name.
    """
    file = Path(path).resolve()
    hint = "Pass the path of a Python file that registers an optimizer"
    if not file.is_file() or file.suffix != ".py":
        raise ConfigurationError("--import", path, "must be an existing Python file", hint)
    name = file.stem
    if name in sys.modules:
        if getattr(sys.modules[name], "__file__", None) == str(file):
            return
        raise ConfigurationError("--import", path, f"a module {name} exists", "Rename the file")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    # before it runs, as Python's own import does, because dataclasses look their module up
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
