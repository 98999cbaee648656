"""Plans a training: the real optimizer runs dry on the ranks that matter, and is timed on paper.

Ranks of equal role are equal. Pipeline stages of one kind have one plan, so one rank of each kind
is built; who computes what is known to all ranks of a group, so the busiest one is found without
running the others, and is run. What the group of one rank's experts does, those of others do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import distributed

from megatron_eopt.base.agreement import group_ranks_in, ranks_of
from megatron_eopt.build.factory import get_megatron_optimizer
from megatron_eopt.dry_run import Report, dry_world, report_of, schedules_of
from megatron_eopt.layouts.assignment import Float64Array
from megatron_eopt.optimizers.modes import Schedule
from megatron_eopt.plan.architectures import Architecture
from megatron_eopt.plan.cost import Times, times
from megatron_eopt.plan.machine import Machine
from megatron_eopt.plan.model import Layout, build_stage, stage_kinds, train_flops
from megatron_eopt.settings.config import EmergingOptimizerConfig
from megatron_eopt.settings.settings import resolve

_AS_BUSY = 0.999
"""Share of the busiest rank's operations from which on a rank is as busy."""

_UTILIZATION = 0.4
"""Share of the GPUs' rate that forward and backward pass reach."""


@dataclass(frozen=True)
class Stage:
    """Pipeline stages of one kind."""

    stages: tuple[int, ...]  # their numbers
    busiest: int  # global rank of the first of them with the most to compute
    loads: Float64Array  # estimated operations of each rank of the first of them

    @property
    def imbalance(self) -> float:
        """Operations of the busiest rank over the mean."""
        return float(self.loads.max() / self.loads.mean()) if self.loads.any() else 1.0


@dataclass(frozen=True)
class Plan:
    """What a step does at one layout."""

    architecture: Architecture  # the model
    layout: Layout  # its cuts
    stages: tuple[Stage, ...]  # kinds of pipeline stages
    rank: int  # the rank that is busiest of all
    report: Report  # what its step does
    times: Times  # how long that takes
    adam: Times  # how long Adam's step on the same weights takes
    train_step: float  # seconds that forward and backward pass take

    @property
    def share(self) -> float:
        """Share of the optimizer's step in a whole iteration."""
        return self.times.step / (self.times.step + self.train_step)


def plan(
    architecture: Architecture,
    layout: Layout,
    machine: Machine,
    config: EmergingOptimizerConfig,
    *,
    tokens: int,
) -> Plan:
    """Run the busiest rank dry, and predict its step.

    Args:
        architecture: The model.
        layout: How it is cut.
        machine: What computes.
        config: The optimizer.
        tokens: Of a global batch.

    Raises:
        ConfigurationError: If the architecture does not fit the layout, or the optimizer refuses.
    """
    kinds = stage_kinds(architecture, layout)
    stages = tuple(_stage(architecture, layout, config, kind, machine.gpus) for kind in kinds)
    worst = max(stages, key=lambda stage: stage.loads.max())
    with dry_world(worst.busiest, layout.world_size):
        report = report_of(_built(architecture, layout, config), lambda: None)
        predicted = times(report, machine, overlaps=resolve(config).overlaps_step)
    changes: dict[str, Any] = {"optimizer": "adam", "muon_overlap_step": False}
    other = replace(config, **changes)
    with dry_world(worst.busiest, layout.world_size):
        adam = report_of(_built(architecture, layout, other), lambda: None)
        operations = train_flops(architecture, tokens)
    adams, rate = times(adam, machine), layout.world_size * machine.flops * _UTILIZATION
    train = operations / rate
    return Plan(architecture, layout, stages, worst.busiest, report, predicted, adams, train)


def _built(architecture: Architecture, layout: Layout, config: EmergingOptimizerConfig) -> Any:
    stage = build_stage(architecture, layout, overlaps=resolve(config).overlaps_step)
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
    # of those with as much to compute the one to which most comes from other computers
    busy = loads[mine] >= _AS_BUSY * loads[mine].max()
    busiest = int(np.where(busy, coming[mine], -1).argmax())
    return Stage(kind, first + busiest, loads[mine])


def _of_all_groups(schedule: Schedule, values: Sequence[float]) -> Float64Array:
    """Return every rank's value, if all groups of the schedule's kind have the same."""
    if schedule.ranks.group is None:
        return np.full(distributed.get_world_size(), float(values[0]))
    (places,) = group_ranks_in([schedule.ranks.group])
    return np.array(values, np.float64)[[place.number for place in places]]
