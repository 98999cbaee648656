"""Carries one exchange over a process group, and never waits for ever."""

import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.layouts.exchange import Exchange
from megatron_eopt.layouts.watch import Watch

__all__ = [
    "Buffers",
    "Label",
    "Pending",
    "RedistributionError",
    "RedistributionTimeoutError",
    "Transport",
    "verify_same_on_all_ranks",
]


class RedistributionError(RuntimeError):
    """A collective of a redistribution failed; names step, wave, direction and group."""


class RedistributionTimeoutError(RedistributionError):
    """Some rank of the group did not take part in time."""


@dataclass(frozen=True, slots=True)
class Label:
    """Which collective this is, for messages."""

    step: int
    wave: int
    direction: str
    group: str

    def __str__(self) -> str:
        return f"step {self.step}, wave {self.wave} ({self.direction}), group {self.group}"


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


class Pending:
    """An all-to-all under way; :meth:`finish` makes its result usable."""

    def __init__(self, work: dist.Work, label: Label, timeout_s: float, watch: Watch) -> None:
        self._work = work
        self._label = label
        self._timeout_s = timeout_s
        self._watch = watch

    def finish(self, device: torch.device) -> None:
        """Wait for the data: a CPU waits here, on a GPU the current stream will.

        Raises:
            RedistributionTimeoutError: If it did not arrive within the time-out.
            RedistributionError: If the process group failed, for instance because a rank died.
        """
        if device.type != "cpu":
            self._watch.add(self._work, str(self._label), self._timeout_s)
            self._work.wait()
            return
        began = time.monotonic()
        try:
            self._work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            if time.monotonic() - began < self._timeout_s:
                raise RedistributionError(f"all-to-all failed at {self._label}: {error}") from error
            raise RedistributionTimeoutError(
                f"all-to-all not done after {self._timeout_s:g} s at {self._label}: a rank of the "
                "group failed or is busy elsewhere. Look for the first error among its ranks, or "
                "raise the time-out."
            ) from error


class Transport:
    """Starts the all-to-alls of one group.

    Args:
        group: The process group; None for a single process without torch.distributed.
        name: What the group is, for messages.
        timeout_s: Seconds to wait for the other ranks in one collective.
    """

    def __init__(self, group: dist.ProcessGroup | None, name: str, timeout_s: float) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        ranks = [0] if group is None else dist.get_process_group_ranks(group)
        shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        self.group_name = f"{name!r} of {self.world_size} ranks ({shown})"
        self._timeout_s = timeout_s
        self._watch = Watch()

    def start(
        self, exchange: Exchange, send: Tensor, recv: Tensor, step: int, wave: int, direction: str
    ) -> Pending | None:
        """Start one all-to-all; None if nothing has to travel anywhere in the group.

        Args:
            exchange: The direction's plan.
            send: Packed elements, ``sum(send_sizes)``; not to be written before ``finish``.
            recv: Where elements arrive, ``sum(recv_sizes)``.
            step: Number of the step, for messages.
            wave: Number of the wave, for messages.
            direction: ``in`` or ``out``, for messages.
        """
        if not exchange.collective:
            return None
        label = Label(step, wave, direction, self.group_name)
        try:
            work = dist.all_to_all_single(
                recv,
                send,
                list(exchange.recv_sizes),
                list(exchange.send_sizes),
                group=self.group,
                async_op=True,
            )
        except RuntimeError as error:
            raise RedistributionError(f"all-to-all failed at {label}: {error}") from error
        assert work is not None
        return Pending(work, label, self._timeout_s, self._watch)


def verify_same_on_all_ranks(
    group: dist.ProcessGroup | None, digest: str, what: str, device: torch.device
) -> None:
    """Raise on every rank unless all ranks of the group have the same digest.

    Args:
        group: The group; None for a single process.
        digest: Hexadecimal, of equal length on all ranks.
        what: What was hashed, for the message.
        device: Where the group's collectives take their tensors.

    Raises:
        RedistributionError: Naming the ranks that differ from the most common digest.
    """
    if group is None or dist.get_world_size(group) == 1:
        return
    mine = torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    digests = [bytes(tensor.tolist()).hex() for tensor in gathered]
    common, _ = Counter(digests).most_common(1)[0]
    odd = [rank for rank, other in enumerate(digests) if other != common]
    if odd:
        ranks = dist.get_process_group_ranks(group)
        raise RedistributionError(
            f"{what} differs between ranks: group rank {odd} (global rank "
            f"{[ranks[rank] for rank in odd]}) has another one than most. Every rank must list the "
            "same parameters in the same order with the same configuration."
        )
