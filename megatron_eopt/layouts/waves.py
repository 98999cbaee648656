"""Waves: batches of matrices that travel together, balanced and of bounded size."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron_eopt.layouts.boxes import Int64Array


@dataclass
class _Queue:
    """What one rank computes, wave after wave."""

    bytes: int = 0  # of all its matrices
    cost: float = 0.0
    wave: int = 0  # the last one so far, and what it holds of that
    held: int = 0
    done: float = 0.0  # cost of all that it has in waves

    def due(self, cost: float, size: int, wanted: int, max_bytes: int) -> int:
        """Return the wave in which the next matrix keeps the rank's progress even."""
        middle = (self.done + cost / 2) / self.cost if self.cost else 0.0
        due = max(self.wave, min(int(middle * wanted), wanted - 1))
        full = self.held and self.held + size > max_bytes
        return due + 1 if due == self.wave and full else due

    def take(self, cost: float, size: int, wave: int) -> None:
        """Put the next matrix into a wave."""
        self.wave, self.held = wave, size + (self.held if wave == self.wave else 0)
        self.done += cost


def plan_waves(
    # of every matrix, the same where every rank computes: its owner, or those who share it
    owners: Sequence[int | Sequence[int]] | Int64Array,
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
    """
    teams = [list(owner) if isinstance(owner, Sequence) else [int(owner)] for owner in owners]
    queues: dict[int, _Queue] = {rank: _Queue() for team in teams for rank in team}
    for i, team in enumerate(teams):
        for rank in team:
            queues[rank].bytes += sizes[i]
            queues[rank].cost += costs[i]
    fullest = max((queue.bytes for queue in queues.values()), default=0)
    wanted = max(at_least, -(-fullest // max_bytes))
    numbers = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-costs[i], i)):
        mine = [queues[rank] for rank in teams[i]]
        numbers[i] = max(queue.due(costs[i], sizes[i], wanted, max_bytes) for queue in mine)
        for queue in mine:
            queue.take(costs[i], sizes[i], numbers[i])
    order = sorted(range(len(sizes)), key=lambda i: (numbers[i], -costs[i], i))
    return [list(wave) for _, wave in groupby(order, key=numbers.__getitem__)]


def first_uses[T](waves: Iterable[Iterable[T]]) -> list[list[T]]:
    """Return of each wave's items those that no earlier wave has."""
    seen: set[T] = set()
    found = []
    for items in waves:
        found.append([item for item in dict.fromkeys(items) if item not in seen])
        seen.update(found[-1])
    return found
