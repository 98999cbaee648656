"""The tensors and values in an optimizer's state of one parameter, however it nests them."""

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["leaves", "put"]

_SEPARATOR = "/"


def leaves(state: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every leaf of nested dictionaries, lists and tuples with the path to it."""
    for path, value in _walk(state):
        yield _SEPARATOR.join(path), value


def put(state: dict[str, Any], path: str, value: Any) -> None:
    """Write a leaf to where :func:`leaves` found it; what leads there must exist."""
    *way, last = path.split(_SEPARATOR)
    place: Any = state
    for step in way:
        place = place[_key(place, step)]
    place[_key(place, last)] = value


def _walk(value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(number), item) for number, item in enumerate(value)]
    else:
        yield (), value
        return
    for name, item in items:
        for path, leaf in _walk(item):
            yield (name, *path), leaf


def _key(place: Any, step: str) -> Any:
    if isinstance(place, list | tuple):
        return int(step)
    return next((key for key in place if str(key) == step), step)
