"""Computes equal stacks of a dry run once and counts them as often as they occur.

Tensors of a dry run have no values, so stacks of one shape cause the same kernels and allocations.
Large ranks have thousands of them, and running each takes minutes.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from megatron_eopt.base.live_bytes import LiveBytes
from megatron_eopt.cpu.patches import Patch
from megatron_eopt.math.orthogonalize import Orthogonalization
from megatron_eopt.tools.dry_run.counting import Counts, updating_optimizer


def counting_once() -> Patch:
    """Return a patch that orthogonalizes the first of equal stacks only.

    Active :class:`Counts` and :class:`LiveBytes` see what the others would have caused.
    """
    compute = Orthogonalization.factors_
    counted: dict[Hashable, tuple[Counts, list[int]]] = {}

    def factors_(*args: Any, **kwargs: Any) -> None:
        modes = _get_current_dispatch_mode_stack()  # type: ignore[no-untyped-call]
        live = [mode for mode in modes if isinstance(mode, LiveBytes)]
        counts = [mode for mode in modes if isinstance(mode, Counts)]
        # a first step may do more than the following ones, so each block counts its own
        block = (updating_optimizer(), *map(id, (*live, *counts)))
        how = (*map(_kind, args), *((name, _kind(kwargs[name])) for name in sorted(kwargs)))
        key = (block, *how)
        if key in counted:
            once, growths = counted[key]
            for each in counts:
                each.add(once)
            for tracker, growth in zip(live, growths, strict=True):
                tracker.rise(growth)
        else:
            with Counts() as once, _growths(live) as growths:
                result: object = compute(*args, **kwargs)  # type: ignore[func-returns-value]
            if result is not None:
                raise TypeError("factors_ must work in place, or equal stacks cannot be skipped")
            counted[key] = (once, growths)

    return Patch(Orthogonalization, "factors_", factors_)


def _kind(value: Any) -> Hashable:
    """Return what an argument shares with others that cause the same work."""
    is_tensor = isinstance(value, Tensor)
    return (value.shape, value.stride(), value.dtype) if is_tensor else value


@contextmanager
def _growths(live: Sequence[LiveBytes]) -> Iterator[list[int]]:
    """Yield a list that gets, after the block, by how much each grew at most inside it."""
    growths: list[int] = []
    peaks = [tracker.peak for tracker in live]
    starts = [tracker.grown for tracker in live]
    for tracker, start in zip(live, starts, strict=True):
        tracker.peak = start
    yield growths
    for tracker, start, peak in zip(live, starts, peaks, strict=True):
        growths.append(tracker.peak - start)
        tracker.peak = max(peak, tracker.peak)
