"""Attribute replacements that are taken back."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


class Patch(NamedTuple):
    """One attribute of a module or class, and the value that it shall have for a while."""

    owner: Any
    name: str
    value: Any


@contextlib.contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Set attributes in order for a block, and restore the former values in the opposite order.

    Raises:
        AttributeError: If an owner has no attribute of that name. A stand-in for something that
            is not there would hide that torch or Megatron has changed.
    """
    with contextlib.ExitStack() as undo:
        for owner, name, value in patches:
            # vars() and not getattr(): a class hands out its static methods unwrapped
            if name not in vars(owner):
                raise AttributeError(f"{owner!r} has no attribute {name!r}")
            undo.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, value)
        yield
