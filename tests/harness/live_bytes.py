"""How many more bytes of tensors live at once during a block than before it."""

import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Follows every storage for as long as anything refers to it.

    What kernels allocate inside of one operation is not seen.

    Attributes:
        peak: The most bytes by which living storages exceeded those at the beginning.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        for item in gc.get_objects():
            if issubclass(type(item), torch.Tensor):
                self._note(item)
        self._before = self._bytes()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # of what is only now seen to have been there nothing is new
        for item in tree_iter((args, kwargs)):
            self._before += self._note(item)
        result = func(*args, **(kwargs or {}))
        if sum(self._note(item) for item in tree_iter(result)):
            self.peak = max(self.peak, self._bytes() - self._before)
        return result

    def _note(self, item: Any) -> int:
        """Follow a tensor's storage, and return its size if that is new."""
        if type(item) not in (torch.Tensor, torch.nn.Parameter) or item.device.type == "meta":
            return 0
        storage = item.untyped_storage()
        known = self._alive.get(storage._cdata)
        if known is not None and not known[0].expired():
            return 0
        self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return int(storage.nbytes())

    def _bytes(self) -> int:
        self._alive = {key: item for key, item in self._alive.items() if not item[0].expired()}
        return sum(size for _, size in self._alive.values())
