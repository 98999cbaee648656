"""Counts what a step sends, whoever sends it: each collective as it reaches torch."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

DTensor = dist.tensor.DTensor


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(tensor) for tensor in tensors)


def _all_to_all(args: Sequence[Any]) -> float:
    world, rank = dist.get_world_size(), dist.get_rank()
    source, splits = args[1], args[4]
    row = _bytes(source) / max(source.shape[0], 1)
    mine = splits[rank] if splits else source.shape[0] / world
    return _bytes(source) - mine * row


def _functional_all_to_all(args: Sequence[Any]) -> float:
    return _bytes(args[0]) - args[2][dist.get_rank()] * _bytes(args[0]) / max(args[0].shape[0], 1)


def _others() -> int:
    return dist.get_world_size() - 1


def _share() -> float:
    return _others() / dist.get_world_size()


SENT: Mapping[str, Callable[[Sequence[Any]], float]] = {
    "c10d::alltoall_base_": _all_to_all,
    "c10d::gather_": lambda args: 0.0 if args[0] and args[0][0] else _bytes(args[1]),
    "c10d::scatter_": lambda args: _share() * _bytes(args[1]),
    "_c10d_functional::all_to_all_single": _functional_all_to_all,
    "_c10d_functional::all_gather_into_tensor": lambda args: _others() * _bytes(args[0]),
    "_c10d_functional::reduce_scatter_tensor": lambda args: _share() * _bytes(args[0]),
    "_c10d_functional::all_reduce": lambda args: 2 * _share() * _bytes(args[0]),
}
"""Bytes that this rank sends, with the algorithms that need the fewest."""

_NO_DATA = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")


class Wire(TorchDispatchMode):
    """Counts collectives and bytes sent by this rank.

    Attributes:
        calls: Number of calls by name.
        bytes_sent: Bytes that leave this rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes_sent = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let DTensors go first: their collectives come here in turn."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func._schema.name
        if "c10d" in name and not name.endswith(_NO_DATA):
            self.calls[name.rpartition("::")[2]] += 1
            # an unknown collective is an error, not zero bytes
            self.bytes_sent += SENT[name](args)
        return func(*args, **(kwargs or {}))
