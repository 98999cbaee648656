"""Plan a training run: dry-run the real optimizer as the busiest rank, and predict its time.

Only one rank of each kind of pipeline stage is built. It knows the work of all ranks of its group,
which shows the busiest one. All expert-parallel groups are assumed to do the same work.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import distributed

from megatron_eopt.base.agreement import group_ranks_in, ranks_of
from megatron_eopt.config.config import EmergingOptimizerConfig
from megatron_eopt.config.settings import resolve
from megatron_eopt.layouts.assignment import Float64Array
from megatron_eopt.optimizers.modes import Schedule
from megatron_eopt.optimizers.spot_checks import Cost
from megatron_eopt.tools.dry_run import Report, dry_world, report_of, schedules_of
from megatron_eopt.tools.plan.architectures import Architecture
from megatron_eopt.tools.plan.cost import Times, bytes_sent, times
from megatron_eopt.tools.plan.machine import Machine
from megatron_eopt.tools.plan.model import Layout, build_stage, stage_kinds, train_flops
from megatron_eopt.wrappers.factory import get_megatron_optimizer

_AS_BUSY = 0.999
"""A rank with at least this share of the busiest rank's FLOPs counts as equally busy."""

_UTILIZATION = 0.4
"""Share of the GPUs' peak FLOP/s that the forward and backward pass use."""


@dataclass(frozen=True)
class Stage:
    """Equal pipeline stages."""

    stages: tuple[int, ...]  # their pipeline ranks
    busiest: int  # global rank with the most FLOPs in the first of these stages
    loads: Float64Array  # estimated FLOPs of each rank of the first of these stages

    @property
    def imbalance(self) -> float:
        """FLOPs of the busiest rank, divided by the mean over the stage's ranks."""
        return float(self.loads.max() / self.loads.mean()) if self.loads.any() else 1.0


@dataclass(frozen=True)
class Checks:
    """What spot checks add to a step, on average over steps and ranks, and as shares of a step."""

    cost: Cost
    products: float  # share of the matrix products of a mean rank
    bytes: float  # share of the bytes that the planned rank sends, without gradients
    calls: float  # share of its collective calls


@dataclass(frozen=True)
class Plan:
    """What an optimizer step does at one layout, and how long it takes."""

    architecture: Architecture  # the model
    layout: Layout  # the parallel sizes
    stages: tuple[Stage, ...]  # one entry for each kind of pipeline stage
    rank: int  # global rank with the most FLOPs
    report: Report  # counts of that rank's step
    times: Times  # predicted times of that rank's step
    adam: Times  # the same for Adam on the same weights
    train_step: float  # predicted seconds of the forward and backward pass
    checks: Checks | None  # what spot checks add, if they are on

    @property
    def share(self) -> float:
        """The optimizer step's share of an iteration's time, without the all-gather."""
        return self.times.step / (self.times.step + self.train_step)


def plan(
    architecture: Architecture,
    layout: Layout,
    machine: Machine,
    config: EmergingOptimizerConfig,
    *,
    tokens: int,
) -> Plan:
    """Dry-run the busiest rank's optimizer step and predict its time. Needs no GPU.

    Args:
        architecture: The model.
        layout: The parallel sizes.
        machine: The GPU and its links.
        config: The optimizer; it must use the distributed optimizer.
        tokens: Tokens per global batch.

    Raises:
        ConfigurationError: If the model does not fit the layout, or the configuration is invalid.
    """
    kinds = stage_kinds(architecture, layout)
    stages = tuple(_stage(architecture, layout, config, kind, machine.gpus) for kind in kinds)
    worst = max(stages, key=lambda stage: stage.loads.max())
    with dry_world(worst.busiest, layout.world_size):
        optimizer = _built(architecture, layout, config)
        report = report_of(optimizer, lambda: None)
        checks = _checks(optimizer, report, worst)
        settings = resolve(config)
        predicted = times(report, machine, overlaps=settings.config.muon_overlap_dp_comm)
    changes: dict[str, Any] = {"optimizer": "adam", "muon_overlap_dp_comm": False}
    changes["muon_check_fraction"] = 0.0
    other = replace(config, **changes)
    with dry_world(worst.busiest, layout.world_size):
        adam = report_of(_built(architecture, layout, other), lambda: None)
        operations = train_flops(architecture, tokens)
    adams, rate = times(adam, machine), layout.world_size * machine.flops * _UTILIZATION
    train = operations / rate
    return Plan(
        architecture, layout, stages, worst.busiest, report, predicted, adams, train, checks
    )


def _checks(optimizer: Any, report: Report, stage: Stage) -> Checks | None:
    if optimizer.spot_checks is None:
        return None
    cost = optimizer.spot_checks.cost()
    sent = sum(bytes_sent(call) * count for call, count in report.collectives.items())
    calls = sum(report.collectives.values())
    return Checks(
        cost,
        cost.flops / max(float(stage.loads.mean()), 1.0),
        cost.bytes / max(sent, 1.0),
        cost.calls / max(calls, 1),
    )


def _built(architecture: Architecture, layout: Layout, config: EmergingOptimizerConfig) -> Any:
    settings = resolve(config)
    stage = build_stage(architecture, layout, overlaps=settings.config.muon_overlap_dp_comm)
    return get_megatron_optimizer(config, [stage])


def _stage(
    architecture: Architecture,
    layout: Layout,
    config: EmergingOptimizerConfig,
    kind: tuple[int, ...],
    gpus: int,
) -> Stage:
    first = layout.first_rank(kind[0])
    with dry_world(first, layout.world_size):
        optimizer = _built(architecture, layout, config)
        loads, coming = np.zeros(layout.world_size), np.zeros(layout.world_size)
        for _, schedule in schedules_of(optimizer):
            loads += _of_all_groups(schedule, schedule.loads)
            computers = [rank // gpus for rank in ranks_of(schedule.ranks.group)]
            coming += _of_all_groups(schedule, schedule.arrivals(computers))
    mine = slice(first, first + layout.stage_size)
    # among equally busy ranks, take the one that receives most from other nodes
    busy = loads[mine] >= _AS_BUSY * loads[mine].max()
    busiest = int(np.where(busy, coming[mine], -1).argmax())
    return Stage(kind, first + busiest, loads[mine])


def _of_all_groups(schedule: Schedule, values: Sequence[float]) -> Float64Array:
    """Return the value of every global rank, given those of one group's ranks, in its order."""
    if schedule.ranks.group is None:
        return np.full(distributed.get_world_size(), float(values[0]))
    (places,) = group_ranks_in([schedule.ranks.group])
    return np.array(values, np.float64)[[place.number for place in places]]
