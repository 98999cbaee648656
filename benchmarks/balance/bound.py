"""What no assignment of whole matrices to ranks can beat."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

type Float64Array = npt.NDArray[np.float64]

_BOUND_ROUNDS = 30


def lower_bound(costs: Sequence[float] | Float64Array, world_size: int) -> float:
    """What no assignment of whole matrices can beat.

    The maximum of the mean load, the largest cost, the packing bound for equal units (of the ``j *
    world_size + 1`` largest matrices one rank gets ``j + 1``, which cost at least as much as the
    smallest of them), and the largest load for which the bin packing bound L2 of Martello and
    Toth (1990) still proves that ``world_size`` ranks are too few.
    """
    ordered = np.sort(np.asarray(costs, np.float64))[::-1]
    if not ordered.any():
        return 0.0
    total = np.concatenate([[0.0], np.cumsum(ordered)])
    j = np.arange((len(ordered) - 1) // world_size + 1)
    packing = total[j * world_size + 1] - total[j * world_size - j]
    low = float(max(total[-1] / world_size, packing.max()))
    high = 2.0 * low
    for _ in range(_BOUND_ROUNDS):
        load = (low + high) / 2
        if _ranks_needed(ordered, total, load) > world_size:
            low = load
        else:
            high = load
    return low


def _ranks_needed(ordered: Float64Array, total: Float64Array, load: float) -> int:
    """Count ranks that a load limit surely needs, for every threshold of what is small.

    Matrices above half the limit need a rank each; those so large that nothing above the threshold
    fits beside them leave no room for the middle ones, which must fit into the others' room.
    """
    ascending = -ordered
    half = int(np.searchsorted(ascending, -load / 2, "left"))
    small = np.unique(ordered[half:])
    if not len(small):
        return half
    alone = np.searchsorted(ascending, small - load, "left")
    until = np.searchsorted(ascending, -small, "right")
    room = (half - alone) * load - (total[half] - total[alone])
    more = np.ceil((total[until] - total[half] - room) / load - 1e-9)
    return half + int(max(more.max(), 0))
