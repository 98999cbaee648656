"""What is measured of a driver's step: updates, orthogonality, and time.

Nothing here waits for a device or for other ranks, but that the ranks which share a matrix sum its
Gram matrix; numbers stay where they are computed until somebody reads them.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from megatron_eopt.base.meter import Meter
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.optimizers.engine import MatrixEngine

SAMPLES = 4
"""Most matrices of a group of ranks whose orthogonality is looked at."""

ORTHOGONALIZATION = "orthogonalization"
"""Name of the blocks in which matrices are orthogonalized."""


class StepStats:
    """What one driver did in one step, as far as this rank knows.

    Each shard of this rank counts its share, by its number: one over the copies that there are.
    """

    def __init__(self, device: torch.device | str, shares: Mapping[int, float]) -> None:
        self.meter = Meter(device)
        self._shares = shares
        # of updates, which the learning rate is not in yet; a float64 scalar
        self.squares = torch.zeros((), dtype=torch.float64, device=device)
        self.elements = 0.0
        # of the sampled matrices, times their shares; float32 scalars
        self.residuals: list[Tensor] = []
        self.samples = 0.0

    def count_updates(self, numbers: Sequence[int], updates: Sequence[Tensor]) -> None:
        """Count the updates of shards."""
        shares = [self._shares.get(number, 0.0) for number in numbers]
        self.squares += sum_of_squares(updates, shares, self.squares.device)
        self.elements += sum(s * u.numel() for s, u in zip(shares, updates, strict=True))

    def look_at(
        self,
        engine: MatrixEngine,
        matrices: Sequence[int],
        stack: Tensor,
        reduce: ReduceT | None,
        shape: tuple[int, int],
        scale: float,
    ) -> None:
        """Look at those of an engine's ``matrices`` in a stack that are in the sample.

        The stack ``(batch, rows, cols)`` has orthogonal factors times ``scale``, of matrices of
        this ``shape``; with ``reduce`` this rank's pieces of them. A matrix counts its share here,
        one over the ranks that compute it.
        """
        sample = sample_of(len(engine.names))
        share = engine.work.matrices[matrices[0]].share
        for matrix, number in zip(stack, matrices, strict=True):
            if scale and number in sample:
                factor = matrix.to(torch.float32) / scale
                self.residuals.append(share * residual(factor, reduce, shape))
                self.samples += share


def residual(factor: Tensor, reduce: ReduceT | None, shape: tuple[int, int]) -> Tensor:
    """Return ``||U U^T - I||_F / sqrt(m)`` of a matrix of this shape whose short side is ``m``.

    With ``reduce`` the ranks share the long side, and ``factor`` is this one's piece.
    """
    wide = factor.mT if shape[0] > shape[1] else factor
    gram = wide @ wide.mT
    if reduce is not None:
        gram = reduce(gram)
    gram.diagonal().sub_(1)
    distance: Tensor = torch.linalg.matrix_norm(gram)
    return distance / math.sqrt(len(gram))


@cache
def sample_of(matrices: int) -> frozenset[int]:
    """Return a few numbers below the number of matrices, evenly spaced.

    All storages list matrices in the model's order, so these are the same ones in each.
    """
    count = min(SAMPLES, matrices)
    return frozenset(place * matrices // count for place in range(count))


def sum_of_squares(
    tensors: Sequence[Tensor], shares: Sequence[float], device: torch.device | str
) -> Tensor:
    """Return the sum of all squares, each tensor's times its share; a float64 scalar."""
    alike: dict[tuple[float, torch.device], list[Tensor]] = defaultdict(list)
    for tensor, share in zip(tensors, shares, strict=True):
        if share and tensor.numel():
            alike[share, tensor.device].append(tensor)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (share, _), members in alike.items():
        norms = torch.stack(list(torch._foreach_norm(members, 2, dtype=torch.float32)))
        total += share * norms.double().square().sum().to(device)
    return total
