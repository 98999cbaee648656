"""Where tensors begin in memory; tensors without data have no address to tell it."""

from torch import Tensor


def address_of(tensor: Tensor) -> tuple[int, int]:
    """Return the number of a tensor's storage, unique among those that live, and a byte offset."""
    storage = tensor.untyped_storage()._cdata
    return storage, int(tensor.storage_offset()) * tensor.element_size()
