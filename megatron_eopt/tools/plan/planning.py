"""Plan a training run: dry-run the real optimizer as the busiest rank, and predict its time.

Only one rank of each kind of pipeline stage is built. It knows the work of all ranks of its group,
which shows the busiest one. All expert-parallel groups are assumed to do the same work.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from megatron.core.distributed import DistributedDataParallel
from torch import distributed

from megatron_eopt.base.agreement import group_ranks_in, ranks_of
from megatron_eopt.config.settings import resolve
from megatron_eopt.layouts.assignment import Float64Array
from megatron_eopt.optimizers.modes import Schedule
from megatron_eopt.tools.dry_run import Report, dry_world, report_of, schedules_of
from megatron_eopt.tools.plan.architectures import Architecture
from megatron_eopt.tools.plan.cost import Times, times
from megatron_eopt.tools.plan.machine import Machine
from megatron_eopt.tools.plan.model import (
    ParallelLayout,
    build_stage,
    stage_kinds,
    stages,
)
from megatron_eopt.tools.plan.passes import Passes, passes
from megatron_eopt.wrappers.config import EmergingOptimizerConfig
from megatron_eopt.wrappers.factory import get_megatron_optimizer
from megatron_eopt.wrappers.memory import Memory

_AS_BUSY = 0.999
"""A rank with at least this share of the busiest rank's FLOPs counts as equally busy."""


@dataclass(frozen=True)
class Stage:
    """Equal pipeline stages."""

    stages: tuple[int, ...]  # their pipeline ranks
    busiest: int  # global rank with the most FLOPs in the first of these stages
    loads: Float64Array  # estimated FLOPs of each rank of the first of these stages
    first_rank_bytes: int  # of weights, gradients and optimizer state of its first rank

    @property
    def imbalance(self) -> float:
        """FLOPs of the busiest rank, divided by the mean over the stage's ranks."""
        return float(self.loads.max() / self.loads.mean()) if self.loads.any() else 1.0


@dataclass(frozen=True)
class Plan:
    """What an optimizer step does at one layout, and how long it takes."""

    architecture: Architecture  # the model
    layout: ParallelLayout  # the parallel sizes
    stages: tuple[Stage, ...]  # one entry for each kind of pipeline stage, in pipeline order
    rank: int  # global rank with the most FLOPs
    report: Report  # counts of that rank's step
    times: Times  # predicted times of that rank's step
    optimizer: str  # name of the optimizer that is planned
    adam: Times  # predicted times of Adam's step on the same weights
    # of the ranks that compute most in their stage, the one with the most memory, and its memory
    fullest: tuple[int, Memory]
    adam_memory: Memory  # memory of the same rank with Adam
    tokens: int  # tokens per global batch
    passes: Passes  # estimated forward and backward passes
    capacity: float  # bytes of a GPU's memory

    @property
    def share(self) -> float:
        """The optimizer step's share of an iteration's time, without the all-gather."""
        return self.times.step / (self.times.step + self.passes.seconds)

    @property
    def left(self) -> float:
        """Bytes that the fullest rank has left for activations; negative if it does not fit."""
        return self.capacity - self.fullest[1].total

    @property
    def spare(self) -> float:
        """Bytes that activations leave, by their estimate; negative if they do not fit."""
        return self.left - self.passes.activations

    @property
    def iteration(self) -> float:
        """Seconds of an iteration: its passes, the optimizer's step and the all-gather."""
        return self.passes.seconds + self.times.tail

    @property
    def adam_iteration(self) -> float:
        """Seconds of an iteration with Adam."""
        return self.passes.seconds + self.adam.tail

    @property
    def throughput(self) -> float:
        """Tokens a second of all ranks."""
        return self.tokens / self.iteration


def plan(
    architecture: Architecture,
    layout: ParallelLayout,
    machine: Machine,
    config: EmergingOptimizerConfig,
    *,
    tokens: int,
    micro_batch: int = 1,
    tell: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Dry-run the busiest rank's optimizer step and predict its time. Needs no GPU.

    Args:
        architecture: The model.
        layout: The parallel sizes.
        machine: The GPU and its links.
        config: The optimizer; it must use the distributed optimizer.
        tokens: Tokens per global batch.
        micro_batch: Sequences that a rank computes at a time.
        tell: Gets a sentence when another part of the work begins.

    Raises:
        ConfigurationError: If the model does not fit the layout, or the configuration is invalid.
    """
    runs = _DryRuns(architecture, layout, machine, config, tell)
    # the largest stage is probably the busiest one, whose step can then be run at once
    kinds = sorted(stage_kinds(architecture, layout), key=lambda k: runs.size(k[0]), reverse=True)
    each = [runs.stage(kind) for kind in kinds]
    worst = max(each, key=lambda stage: stage.loads.max())
    fullest = max(each, key=lambda stage: stage.first_rank_bytes)
    busiest = runs.steps_of(worst.busiest)
    memory = runs.steps_of(fullest.busiest).report.memory
    room = machine.capacity - memory.total
    with dry_world(0, layout.world_size):
        estimate = passes(
            architecture, layout, machine, tokens=tokens, micro_batch=micro_batch, room=room
        )
    return Plan(
        architecture=architecture,
        layout=layout,
        stages=tuple(sorted(each, key=lambda stage: stage.stages)),
        rank=worst.busiest,
        report=busiest.report,
        times=busiest.times,
        optimizer=resolve(config).optimizer,
        adam=times(runs.adam_of(worst.busiest), machine),
        fullest=(fullest.busiest, memory),
        adam_memory=runs.adam_of(fullest.busiest).memory,
        tokens=tokens,
        passes=estimate,
        capacity=machine.capacity,
    )


def adams(config: EmergingOptimizerConfig) -> EmergingOptimizerConfig:
    """Return the same configuration with Adam for all weights."""
    changes: dict[str, Any] = {"optimizer": "adam", "muon_overlap_dp_comm": False}
    return replace(config, **changes)


@dataclass(frozen=True)
class _Steps:
    """What a rank's step does, and how long it takes."""

    report: Report
    times: Times
    adam: Report | None  # Adam's on the same weights; None if it is not counted yet


class _DryRuns:
    """Builds and steps ranks of one layout; a rank that is the first of its stage only once."""

    def __init__(
        self,
        architecture: Architecture,
        layout: ParallelLayout,
        machine: Machine,
        config: EmergingOptimizerConfig,
        tell: Callable[[str], None],
    ) -> None:
        self._architecture, self._layout = architecture, layout
        self._machine, self._config = machine, config
        settings = resolve(config)
        self._overlaps = settings.config.muon_overlap_dp_comm
        self._tell = tell
        self._most = 0.0  # FLOPs of the busiest rank so far
        self._steps: dict[int, _Steps] = {}

    def size(self, stage: int) -> tuple[int, int]:
        """Return how many layers of a pipeline stage have experts, and how many it has."""
        layers = stages(self._architecture, self._layout)[stage]
        return sum(self._architecture.moe_layers[layer] for layer in layers), len(layers)

    def stage(self, kind: tuple[int, ...]) -> Stage:
        """Return what the ranks of equal stages do, and run the step if it is the busiest's."""
        first = self._layout.first_rank(kind[0])
        self._tell(f"building a rank of stage {kind[0]}")
        with dry_world(first, self._layout.world_size):
            model, optimizer = self._built()
            stage = _stage(optimizer, self._layout, kind, self._machine.gpus)
            # it is built already, so its step costs no second construction
            if stage.busiest == first and stage.loads.max() > self._most:
                self._steps[first] = self._stepped(first, model, optimizer)
        self._most = max(self._most, stage.loads.max())
        return stage

    def steps_of(self, rank: int) -> _Steps:
        """Return what a rank's step does."""
        if rank not in self._steps:
            self._tell(f"building rank {rank}")
            with dry_world(rank, self._layout.world_size):
                self._steps[rank] = self._stepped(rank, *self._built())
        return self._steps[rank]

    def adam_of(self, rank: int) -> Report:
        """Return what Adam's step does on a rank's weights."""
        steps = self.steps_of(rank)
        if steps.adam is None:
            with dry_world(rank, self._layout.world_size):
                counted = self._adam_on(build_stage(self._architecture, self._layout))
            self._steps[rank] = steps = replace(steps, adam=counted)
        assert steps.adam is not None
        return steps.adam

    def _built(self) -> tuple[DistributedDataParallel, Any]:
        model = build_stage(self._architecture, self._layout, overlaps=self._overlaps)
        return model, get_megatron_optimizer(self._config, [model])

    def _stepped(self, rank: int, model: DistributedDataParallel, optimizer: Any) -> _Steps:
        self._tell(f"counting the step of rank {rank}")
        report = report_of(optimizer, lambda: None)
        # without overlap, Adam needs another model
        adam = None if self._overlaps else self._adam_on(model)
        predicted = times(report, self._machine, overlaps=self._overlaps)
        return _Steps(report, predicted, adam)

    def _adam_on(self, model: DistributedDataParallel) -> Report:
        self._tell("counting Adam's step")
        adam = get_megatron_optimizer(adams(self._config), [model])
        return report_of(adam, lambda: None)


def _stage(optimizer: Any, layout: ParallelLayout, kind: tuple[int, ...], gpus: int) -> Stage:
    first = layout.first_rank(kind[0])
    loads, coming = np.zeros(layout.world_size), np.zeros(layout.world_size)
    for _, schedule in schedules_of(optimizer):
        loads += _of_all_groups(schedule, schedule.loads)
        computers = [rank // gpus for rank in ranks_of(schedule.ranks.group)]
        coming += _of_all_groups(schedule, schedule.arrivals(computers))
    of_stage = slice(first, first + layout.stage_size)
    loads, coming = loads[of_stage], coming[of_stage]
    # among equally busy ranks, take the one that receives most from other nodes
    busiest = int(np.where(loads >= _AS_BUSY * loads.max(), coming, -1).argmax())
    return Stage(kind, first + busiest, loads, optimizer.memory().kept)


def _of_all_groups(schedule: Schedule, values: Sequence[float]) -> Float64Array:
    """Return the value of every global rank, given those of one group's ranks, in its order."""
    if schedule.ranks.group is None:
        return np.full(distributed.get_world_size(), float(values[0]))
    (positions,) = group_ranks_in([schedule.ranks.group])
    return np.array(values, np.float64)[[position.number for position in positions]]
