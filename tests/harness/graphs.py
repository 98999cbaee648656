"""CUDA graphs on a CPU: a capture notes the operators of a block, and a replay runs these alone.

Nothing of Python runs in a replay, and each operator reads and writes the memory of the capture. A
capture changes no tensor from before it. In it, the host may neither read a tensor nor make one.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core.optimizer import optimizer_cuda_graph
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_leaves

READS = frozenset({torch.ops.aten._local_scalar_dense.default})
"""What copies from the device to the host: ``item()``."""

UPLOADS = frozenset({torch.ops.aten.lift_fresh.default})
"""What copies the other way: ``torch.tensor`` of numbers."""


class Graph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    @torch.no_grad()
    def replay(self) -> None:
        for function, args, kwargs, results in self.calls:
            found = function(*args, **kwargs)
            for work in tree_iter(found):
                if isinstance(work, torch.ScriptObject):
                    work.wait()
            for kept, new in zip(_tensors(results), _tensors(found), strict=True):
                if _memory(kept) != _memory(new):
                    kept.copy_(new)


class Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operators for a graph, and takes back what they do to earlier tensors."""

    def __init__(self, graph: Graph, refused: frozenset[Any] = READS | UPLOADS) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph, self._refused = graph, refused
        self._own: list[Any] = []  # memory of this capture, which stays its own
        self._before: dict[int, tuple[Any, Any]] = {}
        self.in_operator = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        assert func not in self._refused, f"{func} in a capture"
        kwargs = kwargs or {}
        given = {_memory(tensor): tensor for tensor in _tensors((args, kwargs))}
        own = {storage.data_ptr() for storage in self._own}
        for address, tensor in given.items():
            if address not in own and address not in self._before:
                storage = tensor.untyped_storage()
                self._before[address] = storage, storage.clone()
        self.in_operator = True
        result = func(*args, **kwargs)
        self.in_operator = False
        new = [tensor for tensor in _tensors(result) if _memory(tensor) not in given]
        self._own += [tensor.untyped_storage() for tensor in new]
        if new or func._schema.is_mutable or "c10d" in str(func):
            self._graph.calls.append((func, args, kwargs, result))
        return result

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for storage, before in self._before.values():
            storage.copy_(before)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _read(name: str, capture: Capture) -> Any:
    """Let a method read tensors for operators alone, which stand for kernels."""
    method = getattr(Tensor, name)

    def read(*args: Any, **kwargs: Any) -> Any:
        assert capture.in_operator, f"{name}() in a capture"
        return method(*args, **kwargs)

    return mock.patch.object(Tensor, name, read)


@contextmanager
def recorded_graphs() -> Iterator[list[Graph]]:
    """Let megatron-core's wrapper of an optimizer's step make such graphs; yields them."""
    made: list[Graph] = []

    def new() -> Graph:
        made.append(Graph())
        return made[-1]

    @contextmanager
    def capture(graph: Graph, **_: Any) -> Iterator[None]:
        with ExitStack() as stack:
            noted = Capture(graph)
            for name in ("tolist", "numpy", "__bool__", "__float__", "__int__"):
                stack.enter_context(_read(name, noted))
            is_capturing = mock.patch.object(
                torch.cuda, "is_current_stream_capturing", return_value=True
            )
            stack.enter_context(is_capturing)
            stack.enter_context(noted)
            yield

    wrapper = optimizer_cuda_graph.OptimizerCudaGraphWrapper
    with ExitStack() as stack:
        for place, name, value in (
            (torch.cuda, "CUDAGraph", new),
            (torch.cuda, "graph", capture),
            (torch.cuda, "synchronize", lambda *_: None),
            (optimizer_cuda_graph, "get_shared_capture_stream", lambda: None),
            (optimizer_cuda_graph, "get_graph_pool", lambda _: None),
            (distributed, "barrier", lambda *_: None),
            # its attributes are those of the class
            *((wrapper, name, getattr(wrapper, name)) for name in ("cuda_graph", "result")),
            (wrapper, "curr_iteration", 0),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        yield made
