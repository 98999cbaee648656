"""Ranks as threads that meet to add: the arithmetic of an all-reduce, and a count of calls."""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Barrier, Thread

import torch
from torch import Tensor


class Ranks:
    """The ranks that share a matrix."""

    def __init__(self, size: int) -> None:
        self.parts: list[Tensor] = [torch.empty(0)] * size
        self.barrier = Barrier(size, timeout=30)
        self.calls = [0] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        # collectives take memory as it lies
        assert x.is_contiguous()
        self.parts[rank] = x.clone()
        self.barrier.wait()
        parts = list(self.parts)
        self.barrier.wait()
        self.calls[rank] += 1
        return parts

    def sum(self, rank: int) -> Callable[[Tensor], Tensor]:
        """Return what sums one rank's tensors."""
        return lambda x: torch.stack(self.exchange(rank, x)).sum(0)

    def run(self, function: Callable[[int], None]) -> None:
        """Call a function with the number of each rank, all at once."""
        threads = [Thread(target=function, args=(rank,)) for rank in range(len(self.parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@dataclass
class TeamMember:
    """One rank of a team, which divides small products too."""

    ranks: Ranks
    rank: int

    def __call__(self, x: Tensor) -> Tensor:
        return self.ranks.sum(self.rank)(x)

    def rows(self, m: int) -> tuple[int, int]:
        height = m // len(self.ranks.parts)
        return self.rank * height, (self.rank + 1) * height

    def gather(self, block: Tensor) -> Tensor:
        return torch.cat(self.ranks.exchange(self.rank, block), -2)
