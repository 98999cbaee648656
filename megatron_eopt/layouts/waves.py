"""Waves: batches of matrices that travel together, balanced and of bounded size."""

from collections.abc import Sequence
from itertools import groupby

from megatron_eopt.base.errors import check_number
from megatron_eopt.layouts.boxes import Int64Array


def plan_waves(
    owners: Sequence[int] | Int64Array,  # of every matrix; the same where every rank computes
    costs: Sequence[float],  # estimated, of every matrix
    sizes: Sequence[int],  # bytes of every matrix
    *,
    max_bytes: int,  # that one owner may hold in one wave, or a single matrix
    at_least: int = 1,  # so many waves, for communication to overlap arithmetic
) -> list[list[int]]:
    """Partition matrices into waves in which every owner has about the same share of its work.

    Returns:
        Indices of matrices, wave by wave, matrices of equal cost side by side; no wave is empty.
        The same on every rank: a pure function.

    Raises:
        ConfigurationError: If a bound is not positive.
    """
    check_number("max_bytes", max_bytes, at_least=1)
    check_number("at_least", at_least, at_least=1)
    queues: dict[int, list[int]] = {}
    for i in sorted(range(len(sizes)), key=lambda i: (-costs[i], i)):
        queues.setdefault(int(owners[i]), []).append(i)
    fullest = max((sum(sizes[i] for i in queue) for queue in queues.values()), default=0)
    wanted = max(at_least, -(-fullest // max_bytes))
    numbers = [0] * len(sizes)
    for queue in queues.values():
        total = sum(costs[i] for i in queue)
        wave, held, done = 0, 0, 0.0
        for i in queue:
            middle = (done + costs[i] / 2) / total if total else 0.0
            due = max(wave, min(int(middle * wanted), wanted - 1))
            if due == wave and held and held + sizes[i] > max_bytes:
                due = wave + 1
            wave, held = due, sizes[i] + (held if due == wave else 0)
            done += costs[i]
            numbers[i] = wave
    order = sorted(range(len(sizes)), key=lambda i: (numbers[i], -costs[i], i))
    return [list(wave) for _, wave in groupby(order, key=numbers.__getitem__)]
