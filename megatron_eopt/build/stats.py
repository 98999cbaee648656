"""Statistics of steps that are measured, of all ranks, for each class of optimizer.

A measured step leaves sums where they are computed. Whoever reads them brings the sums of all ranks
together in one all-reduce, and only then the host waits for the device.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from megatron_eopt.base.agreement import device_of_collectives, everyones
from megatron_eopt.layouts.redistribution import EXCHANGE
from megatron_eopt.optimizers.driver import Driver, ParamGroup
from megatron_eopt.optimizers.step_stats import ORTHOGONALIZATION, StepStats, sum_of_squares
from megatron_eopt.optimizers.stepper import Stepper
from megatron_eopt.storage.dtensors import is_uneven, local_of
from megatron_eopt.storage.interface import Storage, Stored

_COLUMNS = (
    *("elements", "rates", "squares", "updated", "squares of updates", "samples", "residuals"),
    *("seconds of exchange", "bytes", "seconds of orthogonalization"),
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


class _Part:
    """What one driver, or an optimizer of megatron-core's own, steps of a storage in one step."""

    def __init__(
        self,
        name: str,
        storage: Storage,
        driver: Driver | None,
        weights: Sequence[_Weight],
        device: torch.device,
    ) -> None:
        self.name = name  # class of the optimizer
        self._storage, self._steps = storage, storage.steps
        self._weights = weights
        self._device = device
        self.step_stats: StepStats | None = None
        if driver is not None:
            self.step_stats = StepStats(device, {one.number: one.share for one in weights})
            driver.measure(self.step_stats)
        tells_updates = driver is not None and driver.tells_updates
        # where nobody tells updates, weights are compared with what they were
        self._before = [
            (one, float(one.group["lr"]), _sample(one.data).clone())
            for one in (() if tells_updates else weights)
            if one.group["lr"] and one.data.numel()
        ]

    def row(self) -> dict[str, Any]:
        """Return what is summed, but for bytes and times."""
        tensors = [one.data for one in self._weights]
        shares = [one.share for one in self._weights]
        sizes = [share * data.numel() for data, share in zip(tensors, shares, strict=True)]
        rates = [one.group["lr"] for one in self._weights]
        row: dict[str, Any] = {
            "elements": sum(sizes),
            "rates": sum(size * rate for size, rate in zip(sizes, rates, strict=True)),
            "squares": sum_of_squares(tensors, shares, self._device),
        }
        if (step_stats := self.step_stats) is not None:
            row |= {"updated": step_stats.elements, "squares of updates": step_stats.squares}
            row |= {"samples": step_stats.samples, "residuals": sum(step_stats.residuals)}
        if self._before and self._storage.steps > self._steps:
            changes = [_sample(one.data).float() - old.float() for one, _, old in self._before]
            # those that were looked at stand for all
            weights = [
                one.share * one.data.numel() / old.numel() / rate**2
                for one, rate, old in self._before
            ]
            row["updated"] = sum(one.share * one.data.numel() for one, *_ in self._before)
            row["squares of updates"] = sum_of_squares(changes, weights, self._device)
        return row


def _sample(weight: Tensor) -> Tensor:
    """Return some numbers of a weight, evenly spaced; odd steps come by all of its columns."""
    numbers = weight.reshape(-1)
    return numbers[:: numbers.numel() // SAMPLED | 1]


class Stats:
    """Measures the steps of a chain's steppers."""

    def __init__(self, steppers: Sequence[Stepper]) -> None:
        self._steppers = steppers
        self._rows: list[tuple[str, dict[str, Any], StepStats | None]] = []
        self._values: dict[str, float] | None = {}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Measure the step that is done in a block, in place of what was measured before."""
        parts = [part for stepper in self._steppers for part in _parts(stepper)]
        try:
            yield
        finally:
            for driver in (driver for stepper in self._steppers for driver in stepper.drivers):
                driver.measure(None)
        self._rows = [(part.name, part.row(), part.step_stats) for part in parts]
        self._values = None

    def values(self) -> dict[str, float]:
        """Return the statistics of the step that was measured last; collective, once for each."""
        if self._values is not None:
            return self._values
        names = sorted(everyones(name for name, *_ in self._rows))
        table = torch.zeros(
            len(names), len(_COLUMNS), dtype=torch.float64, device=device_of_collectives()
        )
        for name, row, step_stats in self._rows:
            if step_stats is not None:
                # for which the host waits
                row |= {
                    "seconds of exchange": step_stats.meter.seconds(EXCHANGE) or 0.0,
                    "bytes": step_stats.meter.sent,
                    "seconds of orthogonalization": step_stats.meter.seconds(ORTHOGONALIZATION)
                    or 0.0,
                }
            for what, value in row.items():
                table[names.index(name), _COLUMNS.index(what)] += value
        distributed.all_reduce(table)
        self._values = {
            f"{name}/{what}": value
            for name, row in zip(names, table.tolist(), strict=True)
            for what, value in _values(dict(zip(_COLUMNS, row, strict=True))).items()
        }
        return self._values


def _parts(stepper: Stepper) -> Iterator[_Part]:
    """Yield what each driver of a stepper steps, or the stepper's optimizer without one."""
    storage = stepper.storage
    if storage.is_stub_optimizer:
        return
    stored = {item.main: item for item in storage.stored()}
    # a rank that stores nothing may compute all the same
    devices = (item.param.device for item in stored.values())
    device = next(devices, device_of_collectives())
    found: list[tuple[str, Driver | None, Iterable[tuple[ParamGroup, Tensor, int]]]] = [
        (driver.name, driver, driver.numbered(stepper.groups_of(driver)))
        for driver in stepper.drivers
    ]
    if not found:
        groups = storage.optimizer.param_groups
        placed = [(group, main, 0) for group in groups for main in group["params"]]
        found = [(type(storage.optimizer).__name__, None, placed)]
    for name, driver, numbered in found:
        weights = [
            _Weight(group, local_of(main).detach(), _share(storage, stored[main]), number)
            for group, main, number in numbered
        ]
        yield _Part(name, storage, driver, weights, device)


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
    ranks = distributed.get_world_size()
    if seconds := row["seconds of exchange"]:
        found["exchange-bytes"] = row["bytes"] / ranks
        found["exchange-seconds"] = seconds / ranks
    if seconds := row["seconds of orthogonalization"]:
        found["orthogonalization-seconds"] = seconds / ranks
    return found
