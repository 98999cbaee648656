"""Names that every parameter of a model gets."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatron_eopt.base.names import GLOBAL_NAME_ATTRIBUTE
from megatron_eopt.routing.places import HeldParameter, places_in


def name_parameters(places: Sequence[HeldParameter]) -> None:
    """Store on every parameter its name in the whole model; a tied one gets its first name."""
    for place in reversed(places):
        setattr(place.param, GLOBAL_NAME_ATTRIBUTE, place.global_name)


def names_in(model_chunks: Sequence[Any]) -> dict[Tensor, str]:
    """Return the name of every parameter of a model's chunks, unique on this rank."""
    return names_of(places_in(model_chunks))


def names_of(places: Sequence[HeldParameter]) -> dict[Tensor, str]:
    """Return the name of every parameter, unique on this rank; a tied one has its first name."""
    prefix = "chunk {}: {}" if any(place.chunk for place in places) else "{1}"
    names: dict[Tensor, str] = {}
    for place in places:
        names.setdefault(place.param, prefix.format(place.chunk, place.name))
    return names
