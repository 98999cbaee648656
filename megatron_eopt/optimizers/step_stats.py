"""Measures an update rule's step: size of updates, orthogonality, and time.

Nothing here waits for a device. Ranks communicate only to sum the Gram matrix of a matrix that they
share. Results stay on the device until they are read.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from megatron_eopt.base.meter import Meter
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.optimizers.exchange import MatrixExchange

SAMPLES = 4
"""Most matrices of a group of ranks whose orthogonality is measured."""

ORTHOGONALIZATION = "orthogonalization"
"""Name of the timed spans in which matrices are orthogonalized."""


type FactorsT = Callable[
    [Tensor, ReduceT | None, tuple[int, int], Sequence[float], Tensor | None], None
]
"""Replaces matrices by scaled orthogonal factors, as ``Orthogonalization.factors_``."""


class StepStats:
    """Statistics of one update rule's step, as far as this rank knows them.

    ``shares`` has the weight of each of this rank's shards in sums: one over its number of copies.
    """

    def __init__(self, device: torch.device | str, shares: Mapping[int, float]) -> None:
        self.meter = Meter(device)
        self._shares = shares
        # sum of squares of updates before the learning rate; a float64 scalar
        self.squares = torch.zeros((), dtype=torch.float64, device=device)
        self.elements = 0.0
        self.residuals: list[Tensor] = []  # of sampled matrices times their shares; float32 scalars
        self.samples = 0.0

    def count_updates(self, updates: Mapping[int, Tensor]) -> None:
        """Add the updates of shards, by their numbers, to the sums."""
        shares = [self._shares.get(number, 0.0) for number in updates]
        tensors = list(updates.values())
        self.squares += sum_of_squares(tensors, shares, self.squares.device)
        self.elements += sum(s * u.numel() for s, u in zip(shares, tensors, strict=True))

    def watching(
        self, factors_: FactorsT, exchange: MatrixExchange, matrices: Sequence[int]
    ) -> FactorsT:
        """Return ``factors_`` that also measures its time, and the orthogonality of its result."""

        def watched(
            stack: Tensor,
            reduce: ReduceT | None,
            shape: tuple[int, int],
            scales: Sequence[float],
            squares: Tensor | None,
        ) -> None:
            with self.meter.span(ORTHOGONALIZATION):
                factors_(stack, reduce, shape, scales, squares)
            self._look_at(exchange, matrices, stack, reduce, shape, math.prod(scales))

        return watched

    def _look_at(
        self,
        exchange: MatrixExchange,
        matrices: Sequence[int],
        stack: Tensor,
        reduce: ReduceT | None,
        shape: tuple[int, int],
        scale: float,
    ) -> None:
        """Measure the orthogonality of those matrices in a stack that are in the sample.

        The stack ``(batch, rows, cols)`` holds orthogonal factors times ``scale``, of matrices of
        the given ``shape``; with ``reduce``, this rank's slabs of them. The share of a matrix is
        one over the number of ranks that compute it.
        """
        sample = sample_of(len(exchange.names))
        # alike in a stack, whose matrices have the same kind of work
        share = exchange.placements[matrices[0]].share
        for matrix, number in zip(stack, matrices, strict=True):
            if scale and number in sample:
                factor = matrix.to(torch.float32) / scale
                self.residuals.append(share * residual(factor, reduce, shape))
                self.samples += share


def residual(factor: Tensor, reduce: ReduceT | None, shape: tuple[int, int]) -> Tensor:
    """Return ``||U U^T - I||_F / sqrt(m)`` of a matrix of this shape, with short side ``m``.

    With ``reduce``, ranks share the long side, and ``factor`` is this rank's slab.
    """
    wide = factor.mT if shape[0] > shape[1] else factor
    gram = wide @ wide.mT
    # all ranks have the same stacks and samples, so all of them call this
    if reduce is not None:
        gram = reduce(gram)
    gram.diagonal().sub_(1)
    distance: Tensor = torch.linalg.matrix_norm(gram)
    return distance / math.sqrt(len(gram))


@cache
def sample_of(matrices: int) -> frozenset[int]:
    """Return up to ``SAMPLES`` evenly spaced indices of matrices.

    All storages list matrices in model order, so they sample the same ones.
    """
    count = min(SAMPLES, matrices)
    return frozenset(place * matrices // count for place in range(count))


def sum_of_squares(
    tensors: Sequence[Tensor], shares: Sequence[float], device: torch.device | str
) -> Tensor:
    """Return the sum of squares of all tensors, each times its share; a float64 scalar."""
    alike: dict[tuple[float, torch.device], list[Tensor]] = defaultdict(list)
    for tensor, share in zip(tensors, shares, strict=True):
        if share and tensor.numel():
            alike[share, tensor.device].append(tensor)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (share, _), members in alike.items():
        norms = torch.stack(list(torch._foreach_norm(members, 2, dtype=torch.float32)))
        total += share * norms.double().square().sum().to(device)
    return total
