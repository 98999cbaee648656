"""A list of attribute replacements that can be taken back."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Patch:
    """One attribute of a module or class, and the value that it shall have for a while."""

    owner: Any
    name: str
    value: Any


@dataclass
class PatchList:
    """Applies patches in order and restores the former values in the opposite order."""

    _former: list[Patch] = field(default_factory=list)

    def apply(self, patches: Iterable[Patch]) -> None:
        """Set every attribute; if one of them fails, those already set are restored.

        Raises:
            AttributeError: If an owner has no attribute of that name. A stand-in for something
                that is not there would hide that torch or Megatron has changed.
        """
        try:
            for patch in patches:
                # vars() and not getattr(): a class hands out its static methods unwrapped
                if patch.name not in vars(patch.owner):
                    raise AttributeError(f"{patch.owner!r} has no attribute {patch.name!r}")
                self._former.append(Patch(patch.owner, patch.name, vars(patch.owner)[patch.name]))
                setattr(patch.owner, patch.name, patch.value)
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Give every attribute its former value."""
        while self._former:
            former = self._former.pop()
            setattr(former.owner, former.name, former.value)
