"""CUDA streams on a CPU, whose work runs as late as a GPU may run it: when another one waits."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_leaves

_READS = frozenset({torch.ops.aten._local_scalar_dense.default})
"""What copies from the device to the host: ``item()``."""


class Launched:
    """Operators that run later, each on the memory of its launch."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    @torch.no_grad()
    def run(self) -> None:
        for function, args, kwargs, results in self.calls:
            found = function(*args, **kwargs)
            for work in tree_iter(found):
                if isinstance(work, torch.ScriptObject):
                    work.wait()
            for kept, new in zip(_tensors(results), _tensors(found), strict=True):
                if _memory(kept) != _memory(new):
                    kept.copy_(new)


class _Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators of a block, and takes back what they do to earlier tensors."""

    def __init__(self, launched: Launched) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._launched = launched
        self._own: list[Any] = []  # memory of this capture, which stays its own
        self._before: dict[int, tuple[Any, Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        assert func not in _READS, f"{func} on a stream that is late"
        kwargs = kwargs or {}
        given = {_memory(tensor): tensor for tensor in _tensors((args, kwargs))}
        own = {storage.data_ptr() for storage in self._own}
        for address, tensor in given.items():
            if address not in own and address not in self._before:
                storage = tensor.untyped_storage()
                self._before[address] = storage, storage.clone()
        result = func(*args, **kwargs)
        new = [tensor for tensor in _tensors(result) if _memory(tensor) not in given]
        self._own += [tensor.untyped_storage() for tensor in new]
        if new or func._schema.is_mutable or "c10d" in str(func):
            self._launched.calls.append((func, args, kwargs, result))
        return result

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for storage, before in self._before.values():
            storage.copy_(before)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class LateStream:
    """Stands for ``torch.cuda.Stream``; the host may not read what is launched on it."""

    def __init__(self) -> None:
        self.launched = Launched()
        self.waits = 0  # times that another stream has waited for its work

    def wait_stream(self, other: Any) -> None:
        """Let what ``other`` has launched run now."""
        other.run()

    def run(self) -> None:
        """Do what has been launched."""
        launched, self.launched = self.launched, Launched()
        self.waits += bool(launched.calls)
        launched.run()


class _MainStream(LateStream):
    """The stream whose work runs when it is launched."""


@contextmanager
def late_streams() -> Iterator[None]:
    """Let ``torch.cuda``'s functions work with :class:`LateStream`."""
    running: list[LateStream] = [_MainStream()]

    @contextmanager
    def stream(one: LateStream) -> Iterator[None]:
        running.append(one)
        with _Capture(one.launched):
            yield
        running.pop()

    def current() -> LateStream:
        return running[-1]

    here = mock.patch.object(torch.cuda, "current_stream", current)
    with mock.patch.object(torch.cuda, "stream", stream), here:
        yield
