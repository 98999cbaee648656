"""Statistics of measured steps over all ranks, for each optimizer class.

A measured step leaves sums on the device. Only :meth:`Stats.values` all-reduces them, once, and
blocks the host.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import (
    param_is_not_gtp_duplicate,
    param_is_not_tensor_parallel_duplicate,
)
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from megatron_eopt.base.agreement import device_of_collectives, gather_unique
from megatron_eopt.checkpoint.dtensor_optimizer import DTensorOptimizer
from megatron_eopt.layouts.redistribution import EXCHANGE
from megatron_eopt.optimizers.assigned_rule import AssignedRule
from megatron_eopt.optimizers.step_stats import ORTHOGONALIZATION, StepStats, sum_of_squares
from megatron_eopt.optimizers.storage import Storage, rules_of
from megatron_eopt.optimizers.update_rule import ParamGroup
from megatron_eopt.storage.local_tensors import is_uneven, local_of
from megatron_eopt.storage.shard import ParamShard

type _Stepping = Storage | DTensorOptimizer

_COLUMNS = (
    *("elements", "rates", "squares", "updated", "squares of updates", "samples", "residuals"),
    *("seconds of exchange", "bytes", "seconds of orthogonalization"),
)
"""The sums over ranks for each optimizer class: Python numbers, or scalars on the device."""

SAMPLED = 1 << 14
"""About so many elements of a larger weight, at least half, are compared to measure updates."""


class _MeasuredWeight(NamedTuple):
    """A weight that this rank stores."""

    group: ParamGroup
    data: Tensor
    share: float  # see _share
    number: int  # number of its shard


class _Part:
    """The weights that one update rule steps in a step."""

    def __init__(self, storage: _Stepping, assigned: AssignedRule) -> None:
        update_rule = assigned.rule
        self.name = update_rule.name  # class of the optimizer
        self._storage, self._steps = storage, storage.steps
        # a rank without stored weights may still compute matrices
        devices = (shard.param.device for shard in update_rule.shards)
        self._device = next(devices, device_of_collectives())
        self._weights = [
            _MeasuredWeight(
                group,
                local_of(main).detach(),
                _share(storage, update_rule.shards[number]),
                number,
            )
            for group, main, number in update_rule.numbered(assigned.groups())
        ]
        shares = {one.number: one.share for one in self._weights}
        self.step_stats = StepStats(self._device, shares)
        update_rule.measure(self.step_stats)
        # if the update rule does not report updates, weights are compared before and after the step
        self._before = [
            (one, float(one.group["lr"]), _sample(one.data).clone())
            for one in (() if update_rule.reports_updates else self._weights)
            # a rate of 0 changes nothing, and changes are divided by the rate
            if one.group["lr"] and one.data.numel()
        ]

    def row(self) -> dict[str, Any]:
        """Return the sums of this rank, without bytes and times."""
        tensors = [one.data for one in self._weights]
        shares = [one.share for one in self._weights]
        sizes = [share * data.numel() for data, share in zip(tensors, shares, strict=True)]
        rates = [one.group["lr"] for one in self._weights]
        row: dict[str, Any] = {
            "elements": sum(sizes),
            "rates": sum(size * rate for size, rate in zip(sizes, rates, strict=True)),
            "squares": sum_of_squares(tensors, shares, self._device),
            "updated": self.step_stats.elements,
            "squares of updates": self.step_stats.squares,
            "samples": self.step_stats.samples,
            "residuals": sum(self.step_stats.residuals),
        }
        if self._before and self._storage.steps > self._steps:
            changes = [_sample(one.data).float() - old.float() for one, _, old in self._before]
            # scaled from the sampled elements to all elements
            weights = [
                one.share * one.data.numel() / old.numel() / rate**2
                for one, rate, old in self._before
            ]
            row["updated"] = sum(one.share * one.data.numel() for one, *_ in self._before)
            row["squares of updates"] = sum_of_squares(changes, weights, self._device)
        return row


def _sample(weight: Tensor) -> Tensor:
    """Return evenly spaced elements of a weight; the stride is odd, to sample all columns."""
    numbers = weight.reshape(-1)
    return numbers[:: numbers.numel() // SAMPLED | 1]


class Stats:
    """Measures the steps of a chain's storages, or of an optimizer for your own training loop."""

    def __init__(self, storages: Sequence[_Stepping]) -> None:
        self._storages = storages
        self._rows: list[tuple[str, dict[str, Any], StepStats]] = []
        self._values: dict[str, float] | None = {}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Measure the step in a block; replaces earlier measurements."""
        parts = [_Part(storage, item) for storage in self._storages for item in storage.assigned]
        try:
            yield
        finally:
            for update_rule in rules_of(self._storages):
                update_rule.measure(None)
        self._rows = [(part.name, part.row(), part.step_stats) for part in parts]
        self._values = None

    def values(self) -> dict[str, float]:
        """Return the statistics of the last measured step; collective, on the first call for it."""
        if self._values is not None:
            return self._values
        names = sorted(gather_unique(name for name, *_ in self._rows))
        # float64, because many ranks add numbers of elements and bytes, which float32 would round
        table = torch.zeros(
            len(names), len(_COLUMNS), dtype=torch.float64, device=device_of_collectives()
        )
        for name, row, step_stats in self._rows:
            meter = step_stats.meter
            # the host waits for these
            row |= {
                "seconds of exchange": meter.seconds(EXCHANGE) or 0.0,
                "bytes": meter.sent,
                "seconds of orthogonalization": meter.seconds(ORTHOGONALIZATION) or 0.0,
            }
            for what, value in row.items():
                table[names.index(name), _COLUMNS.index(what)] += value
        if distributed.is_initialized():
            distributed.all_reduce(table)
        self._values = {
            f"{name}/{what}": value
            for name, row in zip(names, table.tolist(), strict=True)
            for what, value in _values(dict(zip(_COLUMNS, row, strict=True))).items()
        }
        return self._values


def _world_size() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def _share(storage: _Stepping, item: ParamShard) -> float:
    """Return the weight of this rank's copy, so that all ranks count each element once in total.

    The ranks over which the gradient norm is summed count each element once. If several sets of
    these ranks have replicas, each counts by its share.
    """
    if isinstance(storage, DTensorOptimizer):
        if not isinstance(item.main, DTensor):
            return 1 / _world_size()
        # each of the mesh's replicas counts by its share
        return _shards_of(item.main) / item.main.device_mesh.size()
    # the same conditions as in megatron-core's ``_filter_grads_for_norm``
    groups = {name: getattr(storage, name, None) for name in ("tp_group", "expert_tp_group")}
    is_first = param_is_not_tensor_parallel_duplicate(item.param, **groups)
    is_first = is_first and param_is_not_gtp_duplicate(item.param)
    if not (is_first and param_is_not_shared(item.param)):
        return 0.0
    stats: Any = storage
    counted = distributed.get_world_size(stats.get_grad_stats_parallel_group())
    # for these DTensors, megatron-core also sums the gradient norm over the mesh
    if isinstance(item.main, DTensor) and not is_uneven(item.main):
        counted *= _shards_of(item.main)
    return counted / distributed.get_world_size()


def _shards_of(tensor: DTensor) -> int:
    """Return the number of ranks that store different parts of a tensor."""
    extents = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in extents if not placement.is_replicate())


def _values(row: Mapping[str, float]) -> dict[str, float]:
    """Return the statistics of one optimizer class from its sums, without unmeasured ones."""
    stats: dict[str, float] = {}
    ranks = _world_size()
    if elements := row["elements"]:
        stats["learning-rate"] = row["rates"] / elements
        stats["weight-rms"] = math.sqrt(row["squares"] / elements)
    if updated := row["updated"]:
        stats["update-rms"] = math.sqrt(row["squares of updates"] / updated)
    if samples := row["samples"]:
        stats["orthogonality-residual"] = row["residuals"] / samples
    if seconds := row["seconds of exchange"]:
        stats["exchange-bytes"] = row["bytes"] / ranks
        stats["exchange-seconds"] = seconds / ranks
    if seconds := row["seconds of orthogonalization"]:
        stats["orthogonalization-seconds"] = seconds / ranks
    return stats
