"""Collectives counted at torch.distributed's own functions."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVES = (
    "all_to_all_single",
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "broadcast",
)


@contextlib.contextmanager
def counted() -> Iterator[list[tuple[str, int, torch.dtype]]]:
    """Yield a list of (name, bytes that this rank hands over, dtype), filled while inside."""
    calls: list[tuple[str, int, torch.dtype]] = []
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def recorder(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            # the input comes second in functions with a separate output
            tensor = args[0] if name in ("all_reduce", "broadcast") else args[1]
            calls.append((name, tensor.nbytes, tensor.dtype))
            return originals[name](*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, recorder(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
