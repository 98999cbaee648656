"""Time contestants in turn, in the same processes, in a different order in each round.

So a disturbance of the machine affects all of them. Ratios are computed within a round.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist


def measured[T](
    contestants: Mapping[str, Callable[[int], T]], rounds: int, warm_up: int
) -> dict[str, list[T]]:
    """Call each contestant with the round's number; return their results without warm-up rounds."""
    found: dict[str, list[T]] = {name: [] for name in contestants}
    for round_, name in _in_turn(list(contestants), warm_up + rounds):
        one = contestants[name](round_)
        if round_ >= warm_up:
            found[name].append(one)
    return found


def _in_turn[T](contestants: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield (round, contestant) pairs; each round begins with another contestant."""
    for round_ in range(rounds):
        turn = round_ % len(contestants)
        for contestant in (*contestants[turn:], *contestants[:turn]):
            yield round_, contestant


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds of ``work``, from a barrier of all ranks until the GPU has finished."""
    if dist.is_initialized():
        dist.barrier()
    _wait_for_gpu()
    began = time.perf_counter()
    work()
    _wait_for_gpu()
    return time.perf_counter() - began


def milliseconds(work: Callable[[], object]) -> float:
    """Return the milliseconds of ``work``; see :func:`seconds`."""
    return 1e3 * seconds(work)


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return the longest time of all ranks, for each round."""
    return [max(times) for times in zip(*by_rank, strict=True)]


def ratios(theirs: Sequence[float], ours: Sequence[float]) -> list[float]:
    """Return the quartiles over the rounds of theirs / ours."""
    pairs = [a / b for a, b in zip(theirs, ours, strict=True)]
    return statistics.quantiles(pairs, n=4) if pairs else []


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
