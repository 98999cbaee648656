"""Identifies where a tensor begins in memory, also for fake tensors, which have no address."""

from torch import Tensor


def address_of(tensor: Tensor) -> tuple[int, int]:
    """Return an id of a tensor's storage, unique among live ones, and the tensor's byte offset."""
    storage = tensor.untyped_storage()._cdata
    return storage, int(tensor.storage_offset()) * tensor.element_size()
