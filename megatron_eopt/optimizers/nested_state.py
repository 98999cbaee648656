"""State as optimizers nest it: dictionaries, lists and tuples with tensors at their ends."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor


def by_rows(state: dict[str, Any]) -> None:
    """Let all tensors of a state be contiguous, as those that are loaded are.

    The factors that LAPACK returns lie by columns, and products of equal numbers that lie otherwise
    may differ in the last bit.
    """
    for path, value in list(leaves(state)):
        if isinstance(value, Tensor) and not value.is_contiguous():
            put(state, path, value.contiguous())


def leaves(state: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every leaf of nested dictionaries, lists and tuples with the path to it."""
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
    """Write a leaf to where :func:`leaves` found it; what leads there must exist."""
    *way, last = path
    for step in way:
        state = state[_key(state, step)]
    state[_key(state, last)] = value


def _key(place: Any, step: str) -> Any:
    if isinstance(place, list | tuple):
        return int(step)
    return next((key for key in place if str(key) == step), step)
