"""Which box of the whole parameter a plain tensor is, as the code that cut the model declares."""

from typing import NamedTuple

from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import PLACE_ATTRIBUTE


class Place(NamedTuple):
    """A box of a whole parameter; ``param.eopt_place = (offset, shape)``."""

    offset: tuple[int, ...]  # index of its first element in the whole parameter
    shape: tuple[int, ...]  # of the whole parameter


def place_of(param: Tensor, name: str = "parameter") -> Place | None:
    """Return the declared place of a parameter, or None.

    Raises:
        ConfigurationError: If the parameter does not fit there.
    """
    declared = getattr(param, PLACE_ATTRIBUTE, None)
    if declared is None:
        return None
    try:
        place = Place(*(tuple(map(int, part)) for part in declared))
        ends = zip(place.offset, param.shape, place.shape, strict=True)
        fits = all(0 <= first <= first + size <= whole for first, size, whole in ends)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        rule = f"must be (offset, shape), a box of shape {tuple(param.shape)} in the whole shape"
        hint = "Set it to ((first_row, 0), (rows, columns)) where the parameter is cut"
        raise ConfigurationError(f"{name}.{PLACE_ATTRIBUTE}", declared, rule, hint)
    return place


def whole_shape(param: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole parameter, if it has a place; otherwise the tensor's shape."""
    place = place_of(param)
    return tuple(param.shape) if place is None else place.shape


def is_part(param: Tensor) -> bool:
    """Return whether a plain tensor is declared to be only a part of its parameter."""
    return whole_shape(param) != tuple(param.shape)
