"""Replacing objects in Megatron's modules, and putting them back."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

PACKAGE = "megatron"
"""Where replaced objects are looked for: this namespace package and all that is below it."""


@dataclass(frozen=True)
class Rebinding:
    """One name of a module, and the object that it shall mean."""

    owner: ModuleType  # the module that defines the name
    name: str
    replacement: Any  # an object that no module of Megatron holds yet

    @property
    def original(self) -> Any:
        """What the name means now."""
        return vars(self.owner)[self.name]


class Exchange:
    """Swaps objects in every module of Megatron that holds them, under whatever name.

    Modules import functions and classes from each other by name, so that one object is bound in
    many places, and more are bound when a module is imported later.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[Any, Any]] = []

    @property
    def active(self) -> bool:
        """Whether objects are replaced at present."""
        return bool(self._pairs)

    def apply(self, rebindings: Sequence[Rebinding]) -> None:
        """Replace objects, or none of them and raise an ImportError if a name does not exist."""
        missing = [item for item in rebindings if not hasattr(item.owner, item.name)]
        if missing:
            names = ", ".join(f"{item.owner.__name__}.{item.name}" for item in missing)
            raise ImportError(
                f"this megatron-core has no {names}, which megatron-eopt replaces; nothing was "
                "replaced"
            )
        self._pairs = [(item.original, item.replacement) for item in rebindings]
        _swap({id(original): replacement for original, replacement in self._pairs})

    def undo(self) -> None:
        """Put the originals back, also into modules that were imported in between."""
        _swap({id(replacement): original for original, replacement in self._pairs})
        self._pairs = []


def _swap(by_id: Mapping[int, Any]) -> None:
    for path, module in list(sys.modules.items()):
        if path.split(".")[0] != PACKAGE or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in by_id:
                setattr(module, name, by_id[id(value)])
