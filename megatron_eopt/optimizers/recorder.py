"""Statistics of measured steps over all ranks, for each optimizer class.

A measured step leaves sums and times on the device, without waiting for it. Only
:meth:`Recorder.values` reads them, after one all-reduce.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from megatron_eopt.base.agreement import device_of_collectives, gather_unique
from megatron_eopt.layouts.redistribution import EXCHANGE
from megatron_eopt.storage.local_tensors import local_of

ORTHOGONALIZATION = "orthogonalization"
"""Name of the timed blocks in which matrices are orthogonalized."""

_SUMS = ("elements", "rates", "squares", "updated", "squares of updates", "bytes")
_COLUMNS = (*_SUMS, EXCHANGE, ORTHOGONALIZATION)
"""What is summed over ranks for each optimizer class; of timed blocks, their seconds."""

SAMPLED = 1 << 14
"""About so many elements of a larger weight, at least half, are compared to measure updates."""


class _Weight(NamedTuple):
    """A weight that this rank stores."""

    group: dict[str, Any]
    data: Tensor
    share: float  # how much it counts in sums over all ranks

    @property
    def size(self) -> float:
        """The number of elements that this rank counts."""
        return self.share * self.data.numel()


class RuleRecord:
    """What one update rule does in a measured step, as far as this rank knows."""

    def __init__(self, storage: Any, assigned: Any) -> None:
        rule = assigned.rule
        self.name = rule.name  # class of the optimizer
        self._storage, self._steps = storage, storage.steps
        # a rank without stored weights may still compute matrices
        self._device = next((s.param.device for s in rule.shards), device_of_collectives())
        self._weights = {
            number: _Weight(group, local_of(main).detach(), storage.share_of(rule.shards[number]))
            for group, main, number in rule.numbered(assigned.groups())
        }
        self.sums: dict[str, Any] = dict.fromkeys(_SUMS, 0.0)  # numbers, or scalars on the device
        self._blocks: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        # if the rule does not report updates, weights are compared before and after the step
        self._before = [
            (one, float(one.group["lr"]), _sample(one.data).clone())
            for one in (() if rule.reports_updates else self._weights.values())
            # a rate of 0 changes nothing, and changes are divided by the rate
            if one.group["lr"] and one.data.numel()
        ]

    def count_updates(self, updates: Mapping[int, Tensor]) -> None:
        """Add the updates of shards, by their numbers, before they are scaled by the rate."""
        shares = [self._weights[n].share if n in self._weights else 0.0 for n in updates]
        tensors = list(updates.values())
        self.sums["updated"] += sum(s * u.numel() for s, u in zip(shares, tensors, strict=True))
        self.sums["squares of updates"] += self._squares(tensors, shares)

    def count_bytes(self, sent: int) -> None:
        """Add bytes that were sent to other ranks."""
        self.sums["bytes"] += sent

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time a block, by CUDA events on a GPU, else by the host's clock."""
        begin = self._now()
        yield
        self._blocks[name].append((begin, self._now()))

    def finish(self) -> None:
        """Add what is known after the step: weights, and the changes of those compared."""
        weights = list(self._weights.values())
        self.sums["elements"] = sum(one.size for one in weights)
        self.sums["rates"] = sum(one.size * one.group["lr"] for one in weights)
        self.sums["squares"] = self._squares([w.data for w in weights], [w.share for w in weights])
        if self._storage.steps > self._steps:
            changes = [_sample(one.data).float() - old.float() for one, _, old in self._before]
            # scaled from the sampled elements to all elements
            scales = [one.size / old.numel() / rate**2 for one, rate, old in self._before]
            self.sums["updated"] += sum(one.size for one, *_ in self._before)
            self.sums["squares of updates"] += self._squares(changes, scales)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of all timed blocks by name, after waiting for them."""
        return {name: sum(map(_seconds, blocks)) for name, blocks in self._blocks.items()}

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _squares(self, tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
        """Return the sum of squares of all tensors, each times its share; a float64 scalar."""
        alike: dict[tuple[float, torch.device], list[Tensor]] = defaultdict(list)
        for tensor, share in zip(tensors, shares, strict=True):
            if share and tensor.numel():
                alike[share, tensor.device].append(tensor)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for (share, _), members in alike.items():
            norms = torch.stack(list(torch._foreach_norm(members, 2, dtype=torch.float32)))
            total += share * norms.double().square().sum().to(self._device)
        return total


class Recorder:
    """Measures the steps of a chain's storages, or of an optimizer for your own training loop.

    Each has ``assigned`` update rules, a number of ``steps``, and says how much a shard counts
    (``share_of``).
    """

    def __init__(self, storages: Sequence[Any]) -> None:
        self._storages = storages
        self._records: list[RuleRecord] = []
        self._values: dict[str, float] | None = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Measure the step in a block; replaces earlier measurements."""
        parts = [(storage, item) for storage in self._storages for item in storage.assigned]
        records = [RuleRecord(*part) for part in parts]
        for record, (_, item) in zip(records, parts, strict=True):
            item.rule.measure(record)
        try:
            yield
        finally:
            for _, item in parts:
                item.rule.measure(None)
        for record in records:
            record.finish()
        self._records, self._values = records, None

    def values(self) -> dict[str, float]:
        """Return the statistics of the last measured step; collective, on the first call for it."""
        if self._values is not None:
            return self._values
        names = sorted(gather_unique(record.name for record in self._records))
        # float64, because many ranks add numbers of elements and bytes, which float32 would round
        table = torch.zeros(
            len(names), len(_COLUMNS), dtype=torch.float64, device=device_of_collectives()
        )
        for record in self._records:
            for what, value in (record.sums | record.seconds()).items():
                table[names.index(record.name), _COLUMNS.index(what)] += value
        ranks = 1
        if distributed.is_initialized():
            distributed.all_reduce(table)
            ranks = distributed.get_world_size()
        self._values = {
            f"{name}/{what}": value
            for name, row in zip(names, table.tolist(), strict=True)
            for what, value in _values(dict(zip(_COLUMNS, row, strict=True)), ranks).items()
        }
        return self._values


def _values(row: Mapping[str, float], ranks: int) -> dict[str, float]:
    """Return the statistics of one optimizer class from its sums, without unmeasured ones."""
    stats: dict[str, float] = {}
    if elements := row["elements"]:
        stats["learning-rate"] = row["rates"] / elements
        stats["weight-rms"] = math.sqrt(row["squares"] / elements)
    if updated := row["updated"]:
        stats["update-rms"] = math.sqrt(row["squares of updates"] / updated)
    if seconds := row[EXCHANGE]:
        stats["exchange-bytes"] = row["bytes"] / ranks
        stats["exchange-seconds"] = seconds / ranks
    if seconds := row[ORTHOGONALIZATION]:
        stats["orthogonalization-seconds"] = seconds / ranks
    return stats


def _sample(weight: Tensor) -> Tensor:
    """Return evenly spaced elements of a weight; the stride is odd, to sample all columns."""
    numbers = weight.reshape(-1)
    return numbers[:: numbers.numel() // SAMPLED | 1]


def _seconds(block: tuple[Any, Any]) -> float:
    begin, end = block
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
