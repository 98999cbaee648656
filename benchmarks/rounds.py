"""Measuring in turn: ours and its peers in the same processes, in every round in another order.

So all of them see the same disturbances of a shared machine, and ratios are taken within a round.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist


def measured[T](
    contestants: Mapping[str, Callable[[int], T]], rounds: int, warm_up: int
) -> dict[str, list[T]]:
    """Return what each contestant finds, called with the round, in all but the first rounds."""
    found: dict[str, list[T]] = {name: [] for name in contestants}
    for round_, name in _in_turn(list(contestants), warm_up + rounds):
        one = contestants[name](round_)
        if round_ >= warm_up:
            found[name].append(one)
    return found


def _in_turn[T](contestants: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield round and contestant; who goes first changes from round to round."""
    for round_ in range(rounds):
        turn = round_ % len(contestants)
        for contestant in (*contestants[turn:], *contestants[:turn]):
            yield round_, contestant


def seconds(work: Callable[[], object]) -> float:
    """Return how long some work takes, begun together on all ranks and done on the GPU."""
    if dist.is_initialized():
        dist.barrier()
    _wait_for_gpu()
    began = time.perf_counter()
    work()
    _wait_for_gpu()
    return time.perf_counter() - began


def milliseconds(work: Callable[[], object]) -> float:
    """Return the same in milliseconds."""
    return 1e3 * seconds(work)


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return the longest time of all ranks, round by round."""
    return [max(times) for times in zip(*by_rank, strict=True)]


def ratios(theirs: Sequence[float], ours: Sequence[float]) -> list[float]:
    """Return quartiles of the ratio, round by round."""
    pairs = [a / b for a, b in zip(theirs, ours, strict=True)]
    return statistics.quantiles(pairs, n=4) if pairs else []


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
