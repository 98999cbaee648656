"""Nested optimizer state: dictionaries, lists and tuples with tensors as leaves."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor


def by_rows(state: dict[str, Any]) -> None:
    """Make all tensors of a state contiguous, as loaded ones are, so that resuming is bit-equal.

    LAPACK returns column-major factors, and memory order can change the last bit of a product.
    """
    for path, value in list(leaves(state)):
        if isinstance(value, Tensor) and not value.is_contiguous():
            put(state, path, value.contiguous())


def leaves(state: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield ``(path, leaf)`` for every leaf of nested dictionaries, lists and tuples."""
    if isinstance(state, Mapping):
        items = [(str(key), item) for key, item in state.items()]
    elif isinstance(state, list | tuple):
        items = [(str(number), item) for number, item in enumerate(state)]
    else:
        yield path, state
        return
    for name, item in items:
        yield from leaves(item, (*path, name))


def put(state: Any, path: Sequence[str], value: Any) -> None:
    """Write a leaf to a path of :func:`leaves`, whose containers must exist."""
    *way, last = path
    for step in way:
        state = state[_key(state, step)]
    state[_key(state, last)] = value


def _key(container: Any, step: str) -> Any:
    if isinstance(container, list | tuple):
        return int(step)
    # paths have all keys as strings, the state may have numbers
    return next((key for key in container if str(key) == step), step)
