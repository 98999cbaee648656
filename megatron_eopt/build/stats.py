"""Statistics of steps that are watched, of all ranks, for each class of optimizer.

A watched step leaves sums where they are computed. Whoever reads them brings the sums of all ranks
together in one all-reduce, and only then the host waits for the device.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from megatron_eopt.base.agreement import device_of_collectives, everyones
from megatron_eopt.layouts.redistribution import EXCHANGE
from megatron_eopt.optimizers.driver import Driver, ParamGroup
from megatron_eopt.optimizers.member import Member
from megatron_eopt.optimizers.step_stats import ORTHOGONALIZATION, StepStats, sum_of_squares
from megatron_eopt.stores.dtensors import is_uneven, local_of
from megatron_eopt.stores.interface import Storage, Stored

_COLUMNS = (
    *("elements", "rates", "squares", "updated", "squares of updates", "samples", "residuals"),
    *("exchanging", "seconds of exchange", "bytes", "seconds of orthogonalization"),
)
"""What is summed over the ranks for each class of optimizer: numbers, or scalars on the device."""

SAMPLED = 1 << 14
"""Of a larger stored weight about so many numbers, at least half, are looked at for changes."""


class _Weight(NamedTuple):
    """A weight that this rank stores."""

    group: ParamGroup
    data: Tensor
    share: float  # see _share
    number: int  # of its shard


@dataclass
class _Part:
    """What one driver steps of the weights that this rank stores."""

    name: str  # class of the optimizer
    driver: Driver | None  # None for an optimizer of megatron-core's own
    storage: Storage
    weights: list[_Weight] = field(default_factory=list)
    watch: StepStats | None = None

    @property
    def tells_updates(self) -> bool:
        """Whether the watch gets to know of updates."""
        return self.driver is not None and self.driver.tells_updates


class _Before:
    """Samples of a part's weights, taken before a step."""

    def __init__(self, part: _Part) -> None:
        self.part = part
        self._steps = part.storage.steps
        self._seen = [
            (one, float(one.group["lr"]), _sample(one.data).clone())
            for one in part.weights
            if one.group["lr"] and one.data.numel()
        ]

    def changes(self, device: torch.device) -> dict[str, Any]:
        """Return the row of what has changed since, over the learning rate, if a step was done."""
        if self.part.storage.steps == self._steps:
            return {}
        changes = [_sample(one.data).float() - old.float() for one, _, old in self._seen]
        # those that were looked at stand for all
        shares = [
            one.share * one.data.numel() / old.numel() / rate**2 for one, rate, old in self._seen
        ]
        return {
            "updated": sum(one.share * one.data.numel() for one, *_ in self._seen),
            "squares of updates": sum_of_squares(changes, shares, device),
        }


def _sample(weight: Tensor) -> Tensor:
    """Return some numbers of a weight, evenly spaced; odd steps come by all of its columns."""
    numbers = weight.reshape(-1)
    return numbers[:: numbers.numel() // SAMPLED | 1]


class Stats:
    """Watches the steps of a chain's members."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._names: list[str] | None = None
        self._rows: list[tuple[str, dict[str, Any], StepStats | None]] = []
        self._values: dict[str, float] | None = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the step that is done in a block, in place of the one that was watched before."""
        stored = (item for member in self._members for item in member.storage.stored())
        first = next(stored, None)
        device = device_of_collectives() if first is None else first.param.device
        parts = [part for member in self._members for part in _parts(member)]
        driven = [(part, part.driver) for part in parts if part.driver is not None]
        for part, driver in driven:
            part.watch = StepStats(device, {one.number: one.share for one in part.weights})
            driver.measure(part.watch)
        before = [_Before(part) for part in parts if not part.tells_updates]
        try:
            yield
        finally:
            for _, driver in driven:
                driver.measure(None)
        self._rows = [(part.name, _row(part, device), part.watch) for part in parts]
        self._rows += [(one.part.name, one.changes(device), None) for one in before]
        self._values = None

    def values(self) -> dict[str, float]:
        """Return the statistics of the step that was watched last; collective, once for each."""
        if self._values is None:
            names = self._names = self._names or sorted(everyones(name for name, *_ in self._rows))
            sums = self._summed(names)
            self._values = {
                f"{name}/{what}": value
                for name, row in zip(names, sums, strict=True)
                for what, value in _values(dict(zip(_COLUMNS, row, strict=True))).items()
            }
        return self._values

    def _summed(self, names: Sequence[str]) -> list[list[float]]:
        table = torch.zeros(len(names), len(_COLUMNS), dtype=torch.float64)
        on_device: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        met: set[str] = set()
        for name, row, watch in self._rows:
            measured = _of_meter(watch)
            if measured and name not in met:
                # several members may have one class, and this is one rank
                met.add(name)
                measured["exchanging"] = 1
            for what, value in (row | measured).items():
                place = names.index(name), _COLUMNS.index(what)
                if isinstance(value, Tensor):
                    on_device[place].append(value)
                else:
                    table[place] += value
        table = table.to(device_of_collectives())
        for place, values in on_device.items():
            table[place] += torch.stack(values).sum().to(table.device)
        distributed.all_reduce(table)
        return table.tolist()  # type: ignore[no-any-return]


def _parts(member: Member) -> list[_Part]:
    """Return what each driver of a member steps, or the member's optimizer without one."""
    storage = member.storage
    if storage.is_stub_optimizer:
        return []
    found = [
        (_Part(driver.name, driver, storage), list(driver.numbered(member.groups_of(driver))))
        for driver in member.drivers
    ]
    if not member.drivers:
        groups = storage.optimizer.param_groups
        placed = [(group, main, 0) for group in groups for main in group["params"]]
        found = [(_Part(type(storage.optimizer).__name__, None, storage), placed)]
    stored = {item.main: item for item in storage.stored()}
    for part, placed in found:
        for group, main, number in placed:
            share = _share(storage, stored[main])
            part.weights.append(_Weight(group, local_of(main).detach(), share, number))
    return [part for part, _ in found]


def _share(storage: Storage, item: Stored) -> float:
    """Return how much a weight counts here so that all ranks together count each number once.

    Its gradient is counted once by the ranks over which the gradient norm is summed; what their
    sets have alike, such as replicas, is divided by the number of sets.
    """
    groups = {name: getattr(storage, name, None) for name in ("tp_group", "expert_tp_group")}
    is_first = param_is_not_tensor_parallel_duplicate(item.param, **groups)
    if not (is_first and param_is_not_shared(item.param)):
        return 0.0
    stats: Any = storage
    counted = distributed.get_world_size(stats.get_grad_stats_parallel_group())
    # of these, megatron-core sums gradients over the ranks of a mesh by itself
    if isinstance(item.main, DTensor) and not is_uneven(item.main):
        mesh, placements = item.main.device_mesh, item.main.placements
        extents = zip(mesh.shape, placements, strict=True)
        counted *= math.prod(size for size, place in extents if not place.is_replicate())
    return counted / distributed.get_world_size()


def _row(part: _Part, device: torch.device) -> dict[str, Any]:
    sizes = [one.share * one.data.numel() for one in part.weights]
    tensors, shares = [one.data for one in part.weights], [one.share for one in part.weights]
    row: dict[str, Any] = {
        "elements": sum(sizes),
        "rates": sum(n * one.group["lr"] for n, one in zip(sizes, part.weights, strict=True)),
        "squares": sum_of_squares(tensors, shares, device),
    }
    if (watch := part.watch) is not None:
        # nothing, unless the driver tells its updates
        row |= {"updated": watch.elements, "squares of updates": watch.squares}
        row |= {"samples": watch.samples, "residuals": sum(watch.residuals)}
    return row


def _of_meter(watch: StepStats | None) -> dict[str, Any]:
    """Return bytes and times, for which the host waits."""
    if watch is None or (exchange := watch.meter.seconds(EXCHANGE)) is None:
        return {}
    return {
        "seconds of exchange": exchange,
        "bytes": watch.meter.sent,
        "seconds of orthogonalization": watch.meter.seconds(ORTHOGONALIZATION) or 0.0,
    }


def _values(row: Mapping[str, float]) -> dict[str, float]:
    """Return what the sums of one class of optimizer mean, without what nobody measured."""
    found: dict[str, float] = {}
    if elements := row["elements"]:
        found["learning-rate"] = row["rates"] / elements
        found["weight-rms"] = math.sqrt(row["squares"] / elements)
    if updated := row["updated"]:
        found["update-rms"] = math.sqrt(row["squares of updates"] / updated)
    if samples := row["samples"]:
        found["orthogonality-residual"] = row["residuals"] / samples
    if ranks := row["exchanging"]:
        found["exchange-bytes"] = row["bytes"] / ranks
        found["exchange-seconds"] = row["seconds of exchange"] / ranks
        if seconds := row["seconds of orthogonalization"]:
            found["orthogonalization-seconds"] = seconds / ranks
    return found
