"""Find the layouts of some GPUs with the shortest iterations.

Passes take most of an iteration and are estimated in no time. So layouts are planned in the order
of their passes, until the passes alone take longer than the iterations that were found.
"""

import itertools
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from megatron_eopt.base.errors import ConfigurationError, check_integer
from megatron_eopt.tools.dry_run import dry_world
from megatron_eopt.tools.plan.architectures import Architecture
from megatron_eopt.tools.plan.machine import Machine
from megatron_eopt.tools.plan.model import ParallelLayout, least_bytes, stages
from megatron_eopt.tools.plan.passes import passes
from megatron_eopt.tools.plan.planning import Plan

SHOWN = 10
"""How many layouts a search returns."""

AS_SHORT = 1.01
"""Iterations up to this many times the shortest one count as equally short."""


@dataclass
class Found:
    """What became of the layouts of a sweep."""

    plans: list[Plan] = field(default_factory=list)
    unfit: int = 0  # layouts that need more memory than a GPU has
    longer: int = 0  # layouts with longer iterations than those of ``plans``
    # layouts that do not work, with the reason
    errors: dict[str, ConfigurationError] = field(default_factory=dict)

    @property
    def best(self) -> Plan | None:
        """The plan with most room for activations among the shortest of those that fit."""
        fitting = [plan for plan in self.plans if plan.spare > 0]
        if not fitting:
            return None
        shortest = min(plan.iteration for plan in fitting)
        equal = (plan for plan in fitting if plan.iteration <= AS_SHORT * shortest)
        return max(equal, key=lambda plan: plan.spare)


def layouts_of(
    architecture: Architecture, machine: Machine, ranks: int, sequences: int
) -> list[ParallelLayout]:
    """Return the layouts of GPUs on which a model may train; tensor parallelism is inside a node.

    Args:
        architecture: The model.
        machine: The GPU and its links.
        ranks: The number of GPUs.
        sequences: Sequences per global batch, in microbatches; ranks get equally many.
    """
    check_integer("--ranks", ranks)
    found = []
    experts = architecture.fields.get("num_moe_experts", 1)
    for tensor, pipeline, expert in itertools.product(
        _divisors(machine.gpus), _divisors(ranks), _divisors(experts)
    ):
        try:
            stages(architecture, ParallelLayout(pipeline=pipeline))
        except ConfigurationError:
            continue
        data, left = divmod(ranks // pipeline, tensor)
        if left or not data or sequences % data:
            continue
        for inside in {1, tensor} if experts > 1 else {tensor}:
            if data * tensor % (expert * inside) == 0:
                found.append(ParallelLayout(tensor, pipeline, data, expert, inside))
    return found


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def search(
    layouts: Sequence[ParallelLayout],
    architecture: Architecture,
    machine: Machine,
    planned: Callable[[ParallelLayout], Plan],
    *,
    tokens: int,
    micro_batch: int,
    progress: Callable[[Sequence[ParallelLayout]], Iterable[ParallelLayout]],
) -> Found:
    """Plan layouts until the :data:`SHOWN` shortest iterations of those that fit are known.

    Args:
        layouts: What to choose from.
        architecture: The model.
        machine: The GPU and its links.
        planned: Plans one layout.
        tokens: Tokens per global batch.
        micro_batch: Sequences that a rank computes at a time.
        progress: Gets the layouts in the order in which they are planned, and returns them.
    """
    found, shortest = Found(), dict[ParallelLayout, float]()
    with dry_world(0, 1):
        for layout in layouts:
            room = machine.capacity - least_bytes(architecture, layout)
            least = passes(
                architecture, layout, machine, tokens=tokens, micro_batch=micro_batch, room=room
            )
            if least.activations < room:
                shortest[layout] = least.seconds
            else:
                found.unfit += 1
    for layout in progress(sorted(shortest, key=shortest.__getitem__)):
        last = found.plans[SHOWN - 1 : SHOWN]
        if last and shortest[layout] > last[0].iteration:
            break
        try:
            plan = planned(layout)
        except ConfigurationError as error:
            found.errors[str(layout)] = error
            continue
        if plan.spare > 0:
            insort(found.plans, plan, key=lambda plan: plan.iteration)
        else:
            found.unfit += 1
    del found.plans[SHOWN:]
    found.longer = len(layouts) - len(found.plans) - found.unfit - len(found.errors)
    return found
