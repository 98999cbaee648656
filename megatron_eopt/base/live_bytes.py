"""Measures by how many bytes the live tensors grow during a block."""

import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

DEVICE: Any = torch.ops.prim.device.default
"""The operator that tells a tensor's device: of fake ones, called more often than all others."""

_FOLLOWED = (torch.Tensor, torch.nn.Parameter, FakeTensor)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks every live storage; does not see memory allocated inside one operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0  # largest growth so far, in bytes
        self._noted = 0  # bytes of all tracked storages, freed ones included
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        # garbage that is freed during the block would hide new allocations
        if gc.isenabled():
            gc.collect()
        for item in gc.get_objects():
            # `isinstance` would read `__class__`, which some lazy objects in the process compute
            if issubclass(type(item), torch.Tensor):
                self._note(item)
        self._before = self._bytes()

    @property
    def grown(self) -> int:
        """Bytes of live storages now, less those at the start."""
        return self._bytes() - self._before

    def rise(self, more: int) -> None:
        """Note that the live storages grow by ``more`` bytes for a moment."""
        if self._noted - self._before + more > self.peak:
            self.peak = max(self.peak, self.grown + more)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is DEVICE:
            return args[0].device
        # a storage first seen as an argument is older than the block, unless torch.tensor made it
        if func is not torch.ops.aten.lift_fresh.default:
            for item in tree_iter((args, kwargs)):
                self._before += self._note(item)
        result = func(*args, **(kwargs or {}))
        # looking for freed storages is slow, so do it only for a possible new peak
        fresh = sum(self._note(item) for item in tree_iter(result))
        if fresh:
            self.rise(0)
        return result

    def _note(self, item: Any) -> int:
        """Track a tensor's storage; return its bytes if it is new, else 0."""
        if type(item) not in _FOLLOWED or item.device.type == "meta":
            return 0
        storage = item.untyped_storage()
        # the address may belong to a new storage; the weak reference tells if the old one is freed
        tracked = self._alive.get(storage._cdata)
        if tracked is not None:
            if not tracked[0].expired():  # type: ignore[no-untyped-call]
                return 0
            self._noted -= tracked[1]
        size = int(storage.nbytes())
        self._alive[storage._cdata] = (StorageWeakRef(storage), size)  # type: ignore[no-untyped-call]
        self._noted += size
        return size

    def _bytes(self) -> int:
        alive = self._alive.items()
        self._alive = {k: item for k, item in alive if not item[0].expired()}  # type: ignore[no-untyped-call]
        self._noted = sum(size for _, size in self._alive.values())
        return self._noted
