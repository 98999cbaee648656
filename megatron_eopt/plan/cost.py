"""From what a step does to how long it takes on a machine: a roofline, nothing fitted.

* Products take their operations over the rate that products reach, other kernels the bytes that
  they read and write over the memory's rate. Launching them is left out: it runs ahead.
* A collective takes its latency, and the bytes that a rank sends (or receives, if those are more):
  matrices directly, inside a computer and outside at once; all else in a ring on the slowest link.
  Computers have consecutive ranks.
* A wave's matrices come in while the wave before is computed, and leave while the next one is. What
  teams say between their products nothing hides.
* Gathering parameters is counted apart: Adam has it, too. Where buckets are gathered while others
  are stepped, one of the two hides the other, window by window.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_eopt.base.agreement import ranks_of
from megatron_eopt.dry_run import Collective, Report
from megatron_eopt.layouts.exchange import Exchange
from megatron_eopt.optimizers.modes import Schedule
from megatron_eopt.plan.machine import Machine


@dataclass(frozen=True)
class Times:
    """Seconds of one rank's step."""

    products: float  # of matrix products
    elements: float  # of what is done outside of products, which is all that Adam does
    travel: float  # of matrices on their way, hidden or not
    exposed: float  # of that, what no product hides
    teams: float  # of what ranks that share a matrix say to each other
    gather: float  # of collecting the parameters
    tail: float  # from the end of the backward pass until all parameters are collected

    @property
    def step(self) -> float:
        """Seconds of the step, without gathering parameters."""
        return self.products + self.elements + self.exposed + self.teams


def times(report: Report, machine: Machine, *, overlaps: bool = False) -> Times:
    """Predict a rank's step; with ``overlaps`` each bucket is gathered when it is stepped."""
    products = report.total.flops / (machine.flops * machine.efficiency)
    ways = [_ways(schedule, machine) for _, schedule in report.schedules]
    work = [_by_wave(schedule) for _, schedule in report.schedules]
    per_flop = products / max(math.fsum(flops for waves in work for flops in waves), 1.0)
    exposed = teams = gather = 0.0
    for way, waves in zip(ways, work, strict=True):
        exposed += _exposed(way, [per_flop * flops for flops in waves])
    for call, count in report.collectives.items():
        seconds = collective_seconds(call, machine) * count
        if call.name == "allgather_into_tensor_coalesced":
            gather += seconds
        elif call.name != "alltoall_base":
            teams += seconds
    elements = report.total.bytes / machine.memory
    parts = [math.fsum(flops for flops in waves) for waves in work] if overlaps else [1.0]
    travel = math.fsum(seconds for way in ways for seconds in itertools.chain(*way))
    tail = _tail(products + elements + exposed + teams, parts, gather)
    return Times(products, elements, travel, exposed, teams, gather, tail)


def _tail(step: float, parts: Sequence[float], gather: float) -> float:
    """Return the seconds of a step in some parts, each of which is gathered during the next."""
    done = gathered = 0.0
    for part in parts:
        done += step * part / math.fsum(parts)
        gathered = max(gathered, done) + gather / len(parts)
    return gathered


def bytes_sent(call: Collective) -> float:
    """Return how many bytes a rank sends in one collective, in a ring of its ranks."""
    others = call.ranks - 1
    if "allgather" in call.name:
        return call.sent * others  # every other rank's part passes by, too
    if "reduce" in call.name:
        rounds = 2 if call.name.startswith("allreduce") else 1
        return call.sent * rounds * others / call.ranks
    return call.sent


def collective_seconds(call: Collective, machine: Machine) -> float:
    """Predict one collective."""
    is_near = call.first // machine.gpus == call.last // machine.gpus
    rate = machine.link if is_near else machine.network
    return machine.latency + bytes_sent(call) / rate


def _ways(schedule: Schedule, machine: Machine) -> list[tuple[float, float]]:
    """Return the seconds of every wave's way in and out."""
    ranks, size = np.array(ranks_of(schedule.ranks.group)), schedule.plan.element_size
    near = ranks // machine.gpus == ranks[schedule.ranks.rank] // machine.gpus

    def seconds(way: Exchange) -> float:
        if not way.collective:
            return 0.0
        both = np.array([way.send_sizes, way.recv_sizes]) * size
        inside, outside = both[:, near].sum(1).max(), both[:, ~near].sum(1).max()
        return machine.latency + float(max(inside / machine.link, outside / machine.network))

    return [(seconds(wave.inward), seconds(wave.outward)) for wave in schedule.plan.waves]


def _by_wave(schedule: Schedule) -> list[float]:
    """Return the estimated operations of this rank in every wave."""
    ranks = schedule.ranks
    return [
        math.fsum(
            schedule.work.matrices[i].load_of(ranks.rank, ranks.size)
            for i in schedule.computed(wave)
        )
        for wave in schedule.plan.waves
    ]


def _exposed(ways: Sequence[tuple[float, float]], work: Sequence[float]) -> float:
    """Return what waves take beyond their work: each comes in while the one before is computed."""
    arrived = started = done = left = 0.0
    for (inward, outward), seconds in zip(ways, work, strict=True):
        arrived = max(arrived, started) + inward
        started = max(arrived, done)
        done = started + seconds
        left = max(left, done) + outward
    return left - math.fsum(work)
