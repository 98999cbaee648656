"""Temporary replacements of attributes."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


class Patch(NamedTuple):
    """An attribute of a module or class, and its temporary value."""

    owner: Any
    name: str
    value: Any


@contextlib.contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Set attributes for the duration of a block, and restore them in the opposite order.

    Raises:
        AttributeError: If an owner has no such attribute, because torch or Megatron has changed.
    """
    with contextlib.ExitStack() as undo:
        for owner, name, value in patches:
            # vars() because getattr() would unwrap a class's static methods
            if name not in vars(owner):
                raise AttributeError(f"{owner!r} has no attribute {name!r}")
            undo.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, value)
        yield
