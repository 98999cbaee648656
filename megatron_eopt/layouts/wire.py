"""Carries one exchange over a process group: packs, sends, receives, unpacks."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base.agreement import of_every_rank
from megatron_eopt.layouts.copies import Copy
from megatron_eopt.layouts.exchange import Exchange


class RedistributionError(RuntimeError):
    """A collective of a redistribution failed; names step, wave, direction and group."""


class Buffers:
    """Flat buffers that live over steps, one per purpose, dtype and device."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def get(self, purpose: str, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the first ``elements`` of a buffer, made larger if it has to be."""
        key = (purpose, dtype, device)
        tensor = self._tensors.get(key)
        if tensor is None or tensor.numel() < elements:
            tensor = self._tensors[key] = torch.empty(elements, dtype=dtype, device=device)
        return tensor[:elements]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in self._tensors.values())


type WaitT = Callable[[], None]
"""Waits for the data of an all-to-all: a CPU waits in it, on a GPU the current stream will. Raises
a RedistributionError if the process group failed, because a rank died or its time-out is over; on a
GPU the process group's own watchdog finds that out."""


type FlatT = Sequence[Tensor] | Mapping[int, Tensor]
"""Flat contiguous tensors by the index that copies have for them."""


def start_exchange(
    exchange: Exchange, send: Tensor, recv: Tensor, group: dist.ProcessGroup | None, what: str
) -> WaitT | None:
    """Start one all-to-all; None if nothing has to travel anywhere in the group.

    ``send`` holds ``sum(send_sizes)`` packed elements and is not to be written before it has
    finished, ``recv`` is where ``sum(recv_sizes)`` arrive. ``what`` is for messages.
    """
    if not exchange.collective:
        return None
    sizes = (list(exchange.recv_sizes), list(exchange.send_sizes))
    with _named(what, group):
        work = dist.all_to_all_single(recv, send, *sizes, group=group, async_op=True)
    assert work is not None

    def wait() -> None:
        with _named(what, group):
            work.wait()

    return wait


@contextmanager
def _named(what: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        ranks = dist.get_process_group_ranks(group)
        shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        raise RedistributionError(
            f"all-to-all failed at {what} of {len(ranks)} ranks ({shown}): {error}. Look for the "
            "first error among its ranks; a rank that is only slow needs a process group with a "
            "longer time-out."
        ) from error


def run_copies(copies: Sequence[Copy], sources: FlatT, sinks: FlatT) -> None:
    """Copy every block between flat contiguous tensors; dtypes may differ."""
    into = [_block(sinks[copy.sink], copy.size, copy.write) for copy in copies]
    from_ = [_block(sources[copy.source], copy.size, copy.read) for copy in copies]
    if into and into[0].is_cuda:
        # fuse the runs into one kernel; one strided block among them would unfuse them all
        for sink, source in zip(into, from_, strict=True):
            if sink.dim() > 1:
                sink.copy_(source)
        into, from_ = ([block for block in side if block.dim() == 1] for side in (into, from_))
    if into:
        torch._foreach_copy_(into, from_)


def _block(tensor: Tensor, size: tuple[int, ...], place: tuple[int, ...]) -> Tensor:
    return tensor.as_strided(size, place[:-1], tensor.storage_offset() + place[-1])


def verify_same_on_all_ranks(group: dist.ProcessGroup | None, digest: str, what: str) -> None:
    """Raise on every rank unless all ranks of the group have the same digest.

    Raises:
        RedistributionError: Naming the ranks that differ from the most common digest.
    """
    if group is None or dist.get_world_size(group) == 1:
        return
    digests = of_every_rank(digest, group)
    common, _ = Counter(digests).most_common(1)[0]
    odd = [rank for rank, other in enumerate(digests) if other != common]
    if odd:
        ranks = dist.get_process_group_ranks(group)
        raise RedistributionError(
            f"{what} differs between ranks: group rank {odd} (global rank "
            f"{[ranks[rank] for rank in odd]}) has another one than most. Every rank must list the "
            "same parameters in the same order with the same configuration."
        )
