"""Whether tensors lie at one place in memory; tensors without data have no address to tell it."""

from typing import NamedTuple

from torch import Tensor


class Place(NamedTuple):
    """Where a tensor begins.

    Attributes:
        storage: Number of its storage, unique among those that live.
        offset: Bytes from the storage's beginning.
    """

    storage: int
    offset: int


def place_of(tensor: Tensor) -> Place:
    """Return where a tensor begins."""
    storage = tensor.untyped_storage()._cdata
    return Place(storage, int(tensor.storage_offset()) * tensor.element_size())
