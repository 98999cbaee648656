"""What the exact modes cost, in one currency, so that ``auto`` can choose.

Everything is counted in multiply-adds (times two) of matrix products that one rank does meanwhile:

* arithmetic: the standard iteration, ``S (4 n m^2 + 2 m^3)`` for a short side m and a long side n;
  of a matrix whose long side is cut over W ranks each does ``S (4 n m^2 / W + 2 m^3)``;
* wire: :data:`FLOPS_PER_BYTE` for every byte that a rank receives;
* latency: :data:`FLOPS_PER_CALL` for every collective.

The two constants are orders of magnitude and not measurements of anyone's machine: a GPU with 400
TFLOP/s of 16-bit products, 400 GB/s to its neighbours and a few microseconds per call has about
these ratios, and so, by accident, do CPU processes that talk over loopback. Choices only change
near a tie, where being wrong costs little.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_eopt.layouts import Layout, iteration_cost, lower_bound

type Float64Array = npt.NDArray[np.float64]

FLOPS_PER_BYTE = 1e3
FLOPS_PER_CALL = 1e9

_WIRE_BYTES = 4
_STEPS = 5
# numbers of shared matrices that are tried: all small ones, then every factor of about 1.3
_TRIED = sorted({int(1.3**i) for i in range(64)})


@dataclass(frozen=True, eq=False)
class GroupCosts:
    """Costs of the matrices of one group of ranks; all arrays have one entry per matrix.

    Attributes:
        world_size: Ranks of the group.
        whole: Arithmetic on the whole matrix.
        shared: Arithmetic of each rank if the long side is cut over all ranks.
        gathered: Bytes that all ranks together receive if every one gets the whole matrix.
        exchanged: Bytes that all ranks together receive on the way to one owner and back.
        reduced: Bytes that each rank receives in Gram all-reduces and in re-cutting to long-side
            slabs.
        calls: Collectives of a wave of such matrices if they are shared.
        kinds: Equal where matrices share a wave when they are shared.
        eligible: Whether the matrix can be shared.
    """

    world_size: int
    whole: Float64Array
    shared: Float64Array
    gathered: Float64Array
    exchanged: Float64Array
    reduced: Float64Array
    calls: Float64Array
    kinds: Sequence[tuple[int, ...]]
    eligible: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, storage: Sequence[Layout], slabs: Sequence[bool], world_size: int) -> "GroupCosts":
        """Count from layouts.

        Args:
            storage: Where each matrix is stored.
            slabs: Whether it can be shared as it is stored.
            world_size: Ranks of the group.
        """
        rows = np.array([layout.shape for layout in storage], np.float64).reshape(-1, 2)
        short, long = rows.min(1), rows.max(1)
        held = np.array([float(layout.boxes.area.sum()) for layout in storage])
        most = np.array([float(home(layout)[1]) for layout in storage])
        size = short * long
        in_place = np.array(slabs, bool)
        per_rank = (world_size - 1) / world_size
        recut = np.where(in_place, 0.0, 2 * size / world_size * per_rank)
        grams = _STEPS * 2 * per_rank * short**2 / 2
        return cls(
            world_size,
            whole=np.array([iteration_cost(*layout.shape, _STEPS) for layout in storage]),
            shared=_STEPS * (4 * long * short**2 / world_size + 2 * short**3),
            gathered=_WIRE_BYTES * np.maximum(size * world_size - held, 0),
            exchanged=_WIRE_BYTES * (size + held - 2 * most),
            reduced=_WIRE_BYTES * (recut + grams),
            calls=_STEPS + 1 + 2.0 * ~in_place,
            kinds=[layout.shape for layout in storage],
            eligible=long >= world_size,
        )

    def duplicated(self) -> float:
        """Cost of a step in which every rank computes on every matrix."""
        return self._total(float(self.whole.sum()), self.gathered.sum() / self.world_size, 1)

    def owned_but(self, shared: npt.NDArray[np.int64]) -> float:
        """Cost of a step in which the given matrices are shared and the others have owners."""
        rest = np.setdiff1d(np.arange(len(self.whole)), shared)
        arithmetic = lower_bound(self.whole[rest], self.world_size) + self.shared[shared].sum()
        received = self.exchanged[rest].sum() / self.world_size + self.reduced[shared].sum()
        waves = {self.kinds[i]: self.calls[i] for i in shared.tolist()}
        return self._total(float(arithmetic), received, 2 * bool(len(rest)) + sum(waves.values()))

    def cheapest(self) -> npt.NDArray[np.int64] | None:
        """Return which matrices to share, None if every rank had better compute everything.

        The candidates are the most expensive matrices, as many as any number tried.
        """
        order = np.argsort(-self.whole, kind="stable")
        order = order[self.eligible[order]]
        counts = sorted({0, *(n for n in _TRIED if n < len(order)), len(order)})
        costs = [self.owned_but(order[:count]) for count in counts]
        best = int(np.argmin(costs))
        if self.duplicated() < costs[best]:
            return None
        return np.sort(order[: counts[best]])

    @staticmethod
    def _total(arithmetic: float, received: float, calls: float) -> float:
        return arithmetic + FLOPS_PER_BYTE * received + FLOPS_PER_CALL * calls


def home(layout: Layout) -> tuple[int, int]:
    """Return the rank that holds most of a matrix, the lowest one on ties, and how much that is."""
    ranks, piece = np.unique(layout.boxes.rank, return_inverse=True)
    held = np.bincount(piece, weights=layout.boxes.area)
    return int(ranks[held.argmax()]), int(held.max())
