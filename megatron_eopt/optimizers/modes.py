"""Decides where each matrix is computed: the compute layouts of each mode, and the waves.

=============  ==========================================  =====================================
mode           compute layout                              communication
=============  ==========================================  =====================================
blockwise      each rank's piece as its own matrix         none; the update is a different one
duplicated     whole on every rank                         one all-to-all in
exchange       whole on one owner rank, or in slabs on a   one all-to-all in, one out; teams sum
               team of ranks if that is faster             and gather small matrices
distributed    in slabs on a team of all ranks             Gram all-reduces; two all-to-alls if
                                                           the storage is sharded differently
auto           distributed for the most expensive          as these modes
               matrices and exchange for the rest, or
               duplicated if that is faster
=============  ==========================================  =====================================
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal, cast

import numpy as np

from megatron_eopt.base.names import TpModeT
from megatron_eopt.layouts import ExchangePlan, Layout, assign_owners, plan_waves
from megatron_eopt.layouts.assignment import Float64Array
from megatron_eopt.layouts.plan import WavePlan
from megatron_eopt.math import standard_flops
from megatron_eopt.optimizers.teams import COLLECTIVE, MatrixGroup, assign_teams
from megatron_eopt.storage.shard import Ranks

type _Mode = Literal["blockwise", "duplicated", "exchange", "distributed"]

# a rank may store this many times its fair share of a matrix and still compute it in place
_IMBALANCE = 1.25

_FLOAT32 = 4
"""Bytes per element."""

# The usual number of Newton-Schulz steps. Another number scales all costs alike, so choices hardly
# change; only the cost of collectives is then off.
_STEPS = 5


@dataclass(frozen=True, eq=False)
class ComputePlacement:
    """Where one matrix is computed."""

    mode: _Mode
    compute: Layout
    group: MatrixGroup = ()  # the ranks that share it in slabs, if several do

    @property
    def kind(self) -> Hashable:
        """What slabs must share to be computed in one stack."""
        return (self.group, self.compute.shape) if self.group else None

    def load_of(self, rank: int, world_size: int) -> float:
        """Estimate the FLOPs of one of the ranks that compute it."""
        if self.mode == "distributed":
            short, long = sorted(map(float, self.compute.shape))
            return _cost_of_slab(short, long, world_size)
        if self.group:
            return standard_flops(*self.compute.shape) / len(self.group)
        shape = self.compute.local_shape(rank)
        return standard_flops(*shape) if shape else 0.0


@dataclass(frozen=True)
class Schedule:
    """What one group of ranks computes and sends in a step."""

    ranks: Ranks  # the group
    names: Sequence[str]  # name of every matrix
    storage: Sequence[Layout]  # where each is stored
    placements: Sequence[ComputePlacement]  # where each is computed
    plan: ExchangePlan  # what this rank sends and receives in a step
    tensors: int = 1  # consecutive indices of the plan per matrix (2 for gradient and weight)

    def computed(self, wave: WavePlan) -> list[int]:
        """Return the indices of the matrices that this rank computes in a wave."""
        indices = (index for batch in wave.batches for index in batch.matrices)
        return list(dict.fromkeys(index // self.tensors for index in indices))

    @property
    def loads(self) -> list[float]:
        """Estimated FLOPs of each rank of the group."""
        loads = np.zeros(self.ranks.size)
        for placement, count in Counter(self.placements).items():
            for rank in np.unique(placement.compute.boxes.rank):
                loads[rank] += count * placement.load_of(rank, self.ranks.size)
        return loads.tolist()  # type: ignore[no-any-return]

    def arrivals(self, places: Sequence[int]) -> list[float]:
        """Return how many elements each rank receives from other places.

        Args:
            places: Index of each rank's place, such as its computer. A slab is assumed to come from
                each place in the same proportion as the whole matrix.
        """
        coming = np.zeros(self.ranks.size)
        for stored, placement in zip(self.storage, self.placements, strict=True):
            at_rank = stored.boxes.held(self.ranks.size)
            at_place = np.bincount(places, weights=at_rank)[list(places)]
            coming += placement.compute.boxes.held(self.ranks.size) * (1 - at_place / at_rank.sum())
        return coming.tolist()  # type: ignore[no-any-return]


def place_matrices(
    storage: Sequence[Layout],
    ranks: int | Float64Array,
    mode: TpModeT,
    wave_bytes: int,
    *,
    whole_only: bool = False,
    max_ranks_per_matrix: int = 1,
    element_size: int = _FLOAT32,
) -> tuple[tuple[ComputePlacement, ...], tuple[tuple[int, ...], ...]]:
    """Decide where each matrix is computed, and which ones are sent together.

    A pure function, the same on every rank. It returns a placement for each matrix, and the indices
    of each wave's matrices.

    ``ranks`` is their number, or the FLOPs that each has to do anyway. An owner has at most
    ``wave_bytes`` of matrices in a wave. With ``whole_only``, slabs cannot be computed, so no
    matrix is shared. In ``exchange``, up to ``max_ranks_per_matrix`` ranks share one if that is
    faster.
    """
    busy = np.zeros(ranks) if isinstance(ranks, int) else ranks
    world_size = len(busy)
    costs = np.array([standard_flops(*layout.shape) for layout in storage], np.float64)
    modes = _choose_modes(storage, costs, world_size, mode, whole_only=whole_only)
    owners = np.zeros(len(storage), np.int64)
    exchanged = [i for i, m in enumerate(modes) if m == "exchange"]
    shapes = [storage[i].shape for i in exchanged]
    homes = np.array([home(storage[i]) for i in exchanged], np.int64).reshape(-1, 2)
    largest = 1 if whole_only else max_ranks_per_matrix
    # None if single owners are as fast; then these are balanced
    assigned_teams = assign_teams(shapes, world_size, largest, element_size, homes[:, 0])
    teams = dict(zip(exchanged, assigned_teams, strict=True)) if assigned_teams else {}
    if exchanged and not teams:
        owners[exchanged] = assign_owners(
            costs[exchanged],
            world_size,
            home=homes[:, 0],
            share=homes[:, 1].astype(np.float64),
            busy=busy,
        )
    placements, computing = [], []
    placed = cache(ComputePlacement)  # one for all matrices that are computed alike
    for i, m in enumerate(modes):
        group: MatrixGroup = teams.get(i, ())
        match m:
            case "blockwise":
                compute = storage[i].compact()
            case "duplicated":
                compute = Layout.replicated(storage[i].shape, range(world_size))
            case "exchange" if group:
                # short sides stay whole, so that Gram matrices are sums over slabs
                compute = Layout.slabs(storage[i].shape, _long_side(storage[i]), group)
            case "exchange":
                compute = Layout.whole(storage[i].shape, int(owners[i]))
            case "distributed":
                # a team of all ranks, each of which computes every small product
                group, compute = range(world_size), _slabs(storage[i], world_size)
        placements.append(placed(m, compute, group if len(group) > 1 else ()))
        computing.append(group or (int(owners[i]),))
    return tuple(placements), _waves(
        placements, computing, costs, wave_bytes // element_size, world_size
    )


def _choose_modes(
    storage: Sequence[Layout],
    costs: Float64Array,
    world_size: int,
    mode: TpModeT,
    *,
    whole_only: bool,
) -> list[_Mode]:
    if world_size == 1:
        return ["duplicated"] * len(storage)
    if mode in ("blockwise", "duplicated", "exchange"):
        return [cast(_Mode, mode)] * len(storage)
    # all ranks must call the same all-reduces, so each needs a slab
    shared = (
        set()
        if whole_only
        else {i for i, layout in enumerate(storage) if max(layout.shape) >= world_size}
    )
    if mode == "auto":
        chosen = _most_expensive(storage, costs, world_size, shared)
        if chosen is None:
            return ["duplicated"] * len(storage)
        shared = chosen
    return ["distributed" if i in shared else "exchange" for i in range(len(storage))]


def _most_expensive(
    storage: Sequence[Layout], costs: Float64Array, world_size: int, eligible: set[int]
) -> set[int] | None:
    """Return which matrices to share; None if it is faster that every rank computes all.

    These are the most expensive ones, as many as minimize the busiest rank's estimated time. Counts
    that grow by a factor of about 1.3 are tried.
    """
    short, long = np.sort([layout.shape for layout in storage], axis=1).T.astype(np.float64)
    in_slabs = _cost_of_slab(short, long, world_size)
    order = [i for i in np.argsort(-costs, kind="stable").tolist() if i in eligible]
    # every rank computes everything, after one all-to-all
    least, best = costs.sum() + COLLECTIVE, None
    for count in sorted({0, *(min(int(1.3**i), len(order)) for i in range(64))}):
        shared = order[:count]
        rest = np.delete(costs, shared)
        loads = np.bincount(assign_owners(rest, world_size), weights=rest, minlength=1)
        kinds = {storage[i].shape for i in shared}
        # all-to-alls there and back, and for each shape the norm and one Gram matrix per step
        calls = 2 * bool(len(rest)) + (_STEPS + 1) * len(kinds)
        total = loads.max() + in_slabs[shared].sum() + COLLECTIVE * calls
        if total < least:
            least, best = total, set(shared)
    return best


def _cost_of_slab[T: (float, Float64Array)](short: T, long: T, ranks: int) -> T:
    """Return the FLOPs of each of W ranks that share a matrix: ``S (4 n m^2 / W + 2 m^3)``."""
    return _STEPS * (4 * long * short**2 / ranks + 2 * short**3)


def _slabs(storage: Layout, world_size: int) -> Layout:
    """Shard the long side over the ranks: as stored, if that is balanced, else evenly."""
    if _stored_in_slabs(storage, world_size):
        return storage.compact()
    return Layout.slabs(storage.shape, _long_side(storage), range(world_size))


def _stored_in_slabs(storage: Layout, world_size: int) -> bool:
    """Whether only the long side is sharded in storage, about evenly over all ranks."""
    boxes, long = storage.boxes, _long_side(storage)
    across = boxes.width if long == 0 else boxes.height
    size = math.prod(storage.shape)
    # neither replicated, nor on some of the ranks only
    once = int(boxes.area.sum()) == size and len(np.unique(boxes.rank)) == world_size
    if not once or np.any(across != storage.shape[1 - long]):
        return False
    return home(storage)[1] <= _IMBALANCE * size / world_size


# by identity of the layout, which equal parameters share
@lru_cache(maxsize=1 << 16)
def home(layout: Layout) -> tuple[int, int]:
    """Return the rank (the lowest on ties) that stores most of a matrix, and its elements."""
    ranks, piece = np.unique(layout.boxes.rank, return_inverse=True)
    elements = np.bincount(piece, weights=layout.boxes.area)
    return int(ranks[elements.argmax()]), int(elements.max())


def _long_side(storage: Layout) -> Literal[0, 1]:
    """Return the dimension to shard; 1 for square matrices, as the iteration expects."""
    return 0 if storage.shape[0] > storage.shape[1] else 1


def _waves(
    placements: Sequence[ComputePlacement],
    computing: Sequence[MatrixGroup],
    costs: Float64Array,
    most: int,
    world_size: int,
) -> tuple[tuple[int, ...], ...]:
    """Make waves of one kind of work, with at most ``most`` elements per computing rank.

    Slabs in a wave are cut the same way, so that all ranks stack them the same way.
    """
    kinds: dict[tuple[object, ...], list[int]] = {}
    for i, placement in enumerate(placements):
        key: tuple[object, ...] = (placement.mode,)
        if placement.mode == "distributed":
            slab_sizes = placement.compute.boxes.held(world_size).tolist()
            key = (placement.mode, placement.compute.shape, *slab_sizes)
        kinds.setdefault(key, []).append(i)
    waves: list[tuple[int, ...]] = []
    for key, members in kinds.items():
        # of a wave's bytes, each computing rank has only its slab
        cut = world_size if key[0] == "blockwise" else 1
        planned = plan_waves(
            [computing[i] for i in members],
            [costs[i] / len(computing[i]) for i in members],
            [math.prod(placements[i].compute.shape) // (cut * len(computing[i])) for i in members],
            max_bytes=most,
        )
        waves += [tuple(members[j] for j in wave) for wave in planned]
    return tuple(waves)
