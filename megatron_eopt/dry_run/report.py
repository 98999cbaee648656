"""What a step of one rank does, and what the rank holds for it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megatron_eopt.base.live_bytes import LiveBytes
from megatron_eopt.build.memory import Memory
from megatron_eopt.dry_run.counting import Collective, Counts
from megatron_eopt.optimizers.modes import Schedule


@dataclass(frozen=True)
class Report:
    """One rank's step.

    Attributes:
        elements: How many weights each optimizer steps on this rank.
        schedules: Who computes which matrices, by optimizer.
        collectives: How often each is called.
        flops: Floating-point operations of matrix products.
        host_reads: How often the host waits for a value of the device, by who asks.
        memory: What this rank holds.
    """

    elements: dict[str, int]
    schedules: list[tuple[str, Schedule]]
    collectives: Counter[Collective]
    flops: int
    host_reads: Counter[str]
    memory: Memory


def schedules_of(optimizer: Any) -> list[tuple[str, Schedule]]:
    """Return who computes which matrices, with the name of the optimizer that steps them."""
    return [
        (driver.name, schedule)
        for member in optimizer.members
        for driver in member.drivers
        for schedule in driver.schedules
    ]


def report_of(optimizer: Any, give_gradients: Callable[[], None]) -> Report:
    """Let an optimizer step twice, and report what the second step does.

    State and buffers exist from the first step on. All ranks call this together.

    Args:
        optimizer: What ``get_megatron_optimizer`` returned.
        give_gradients: Sets gradients, before either step.
    """
    give_gradients()
    optimizer.step()
    give_gradients()
    with Counts() as counts, LiveBytes() as live:
        optimizer.step()
    elements: Counter[str] = Counter()
    for member in optimizer.members:
        for driver, _, main in member.stepped():
            elements[driver.name] += main.numel()
    return Report(
        elements=dict(elements),
        schedules=schedules_of(optimizer),
        collectives=counts.collectives,
        flops=counts.flops,
        host_reads=counts.host_reads,
        memory=replace(optimizer.memory(), transient=live.peak),
    )
