"""Predict the time of an optimizer step with a roofline model; no constant is fitted.

* Matrix products take FLOPs / (peak * efficiency). Other kernels take bytes / memory bandwidth.
  Kernel launches are left out, since the host runs ahead of the GPU.
* A collective takes latency + bytes / bandwidth. All-to-alls use NVLink and the network at once.
  The others are rings, as fast as their slowest link. The ranks of a node are consecutive.
* Waves (batches of matrices) travel while other waves are computed. The gradient norm's collectives
  and those of ranks that share a matrix are not hidden.
* The all-gather of parameters is separate, since Adam needs it too. If buckets are gathered one by
  one, gathering a bucket overlaps with updating the next.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_eopt.base.agreement import ranks_of
from megatron_eopt.layouts.exchange import Exchange
from megatron_eopt.optimizers.modes import Schedule
from megatron_eopt.tools.dry_run import Collective, Report
from megatron_eopt.tools.plan.machine import Machine


@dataclass(frozen=True)
class Times:
    """Seconds of one rank's optimizer step, by part."""

    products: float  # matrix products
    elements: float  # all other kernels, such as Adam's
    travel: float  # sending matrices and updates between ranks, hidden or not
    exposed: float  # the part of ``travel`` that no product hides
    teams: float  # other collectives: gradient norm, and ranks that share a matrix
    gather: float  # all-gather of the updated parameters
    tail: float  # from the end of the backward pass until all parameters are gathered

    @property
    def step(self) -> float:
        """Seconds of the step, without the all-gather of parameters."""
        return self.products + self.elements + self.exposed + self.teams


def times(report: Report, machine: Machine, *, overlaps: bool = False) -> Times:
    """Predict a rank's step; with ``overlaps``, each bucket is gathered once it is updated."""
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
    """Return the seconds until all is gathered, if each part is gathered during the next."""
    done = gathered = 0.0
    for part in parts:
        done += step * part / math.fsum(parts)
        gathered = max(gathered, done) + gather / len(parts)
    return gathered


def bytes_sent(call: Collective) -> float:
    """Return the bytes that a rank sends in one collective; a ring, unless it is an all-to-all."""
    others = call.ranks - 1
    if "allgather" in call.name:
        return call.sent * others  # in a ring, a rank also forwards the others' shards
    if "reduce" in call.name:
        rounds = 2 if call.name.startswith("allreduce") else 1
        return call.sent * rounds * others / call.ranks
    return call.sent


def collective_seconds(call: Collective, machine: Machine) -> float:
    """Predict the seconds of one collective."""
    is_near = call.first // machine.gpus == call.last // machine.gpus
    rate = machine.link if is_near else machine.network
    return machine.latency + bytes_sent(call) / rate


def _ways(schedule: Schedule, machine: Machine) -> list[tuple[float, float]]:
    """Return, for each wave, the seconds of its all-to-alls to and from the owner ranks."""
    ranks, size = np.array(ranks_of(schedule.ranks.group)), schedule.plan.element_size
    near = ranks // machine.gpus == ranks[schedule.ranks.rank] // machine.gpus

    def seconds(way: Exchange) -> float:
        if not way.collective:
            return 0.0
        both = np.array([way.send_sizes, way.recv_sizes]) * size
        # links send and receive at once, so the larger direction counts
        inside, outside = both[:, near].sum(1).max(), both[:, ~near].sum(1).max()
        return machine.latency + float(max(inside / machine.link, outside / machine.network))

    return [(seconds(wave.inward), seconds(wave.outward)) for wave in schedule.plan.waves]


def _by_wave(schedule: Schedule) -> list[float]:
    """Return this rank's estimated FLOPs in each wave."""
    ranks = schedule.ranks
    return [
        math.fsum(
            schedule.placements[i].load_of(ranks.rank, ranks.size) for i in schedule.computed(wave)
        )
        for wave in schedule.plan.waves
    ]


def _exposed(ways: Sequence[tuple[float, float]], work: Sequence[float]) -> float:
    """Return the seconds of communication that computing other waves does not hide."""
    arrived = started = done = left = 0.0
    for (inward, outward), seconds in zip(ways, work, strict=True):
        # a wave is sent when the one before begins to be computed, not earlier
        arrived = max(arrived, started) + inward
        started = max(arrived, done)
        done = started + seconds
        # updates leave one wave after another
        left = max(left, done) + outward
    return left - math.fsum(work)
