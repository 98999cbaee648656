"""Where the work on each matrix happens: the compute layout that a mode means, and its waves.

=============  ==========================================  =====================================
mode           compute layout                              what it costs besides its arithmetic
=============  ==========================================  =====================================
blockwise      each rank's piece by itself                 nothing; it is another update
duplicated     whole on every rank                         one all-to-all in
exchange       whole at one owner                          one all-to-all in, one out
distributed    the long side cut over the ranks            Gram all-reduces; two all-to-alls
                                                           where the storage is cut otherwise
auto           what is cheapest in all: exchange for       that of these
               some and distributed for other matrices,
               or duplicated for all; see
               :mod:`megatron_eopt.optimizers.costs`
=============  ==========================================  =====================================
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron_eopt.base.names import TpModeT
from megatron_eopt.layouts import Layout, assign_owners, iteration_cost, plan_waves
from megatron_eopt.layouts.boxes import Int64Array
from megatron_eopt.optimizers.costs import GroupCosts, home

type _Mode = Literal["blockwise", "duplicated", "exchange", "distributed"]
type Float64Array = npt.NDArray[np.float64]

# a rank may store this many times its fair share of a matrix and still compute on what it stores
_IMBALANCE = 1.25

_WORK_BYTES = 4
"""Directions and updates are float32 on the wire and in the compute buffers."""


@dataclass(frozen=True, eq=False)
class MatrixWork:
    """How one matrix is computed.

    Attributes:
        mode: The row of the table above.
        compute: Its compute layout.
    """

    mode: _Mode
    compute: Layout

    @property
    def shared(self) -> bool:
        """Whether all ranks of the group compute on slabs of it together."""
        return self.mode == "distributed"


@dataclass(frozen=True, eq=False)
class Work:
    """The work of one engine.

    Attributes:
        matrices: One entry per matrix.
        waves: Indices of matrices that travel together.
    """

    matrices: tuple[MatrixWork, ...]
    waves: tuple[tuple[int, ...], ...]

    def update_shape(self, matrix: int, local: Tensor) -> tuple[int, int]:
        """Return the shape that decides a matrix's scale: blockwise its piece's, else its own."""
        if self.matrices[matrix].mode == "blockwise":
            return cast(tuple[int, int], tuple(local.shape[-2:]))
        return self.matrices[matrix].compute.shape


def plan_work(storage: Sequence[Layout], world_size: int, mode: TpModeT, wave_bytes: int) -> Work:
    """Decide where each matrix is computed; a pure function, the same on every rank.

    Args:
        storage: Where each matrix is stored.
        world_size: Ranks of the group.
        mode: What was asked for.
        wave_bytes: Upper bound of what one owner holds of a wave.
    """
    costs = np.array([iteration_cost(*layout.shape) for layout in storage], np.float64)
    modes = _choose_modes(storage, world_size, mode)
    owners = np.zeros(len(storage), np.int64)
    travelling = [i for i, m in enumerate(modes) if m == "exchange"]
    if travelling:
        homes = np.array([home(storage[i]) for i in travelling], np.int64)
        owners[travelling] = assign_owners(
            costs[travelling], world_size, home=homes[:, 0], share=homes[:, 1].astype(np.float64)
        )
    matrices = []
    for i, m in enumerate(modes):
        match m:
            case "blockwise":
                compute = storage[i].compact()
            case "duplicated":
                compute = Layout.replicated(storage[i].shape, range(world_size))
            case "exchange":
                compute = Layout.whole(storage[i].shape, int(owners[i]))
            case "distributed":
                compute = _slabs(storage[i], world_size)
        matrices.append(MatrixWork(m, compute))
    return Work(tuple(matrices), _waves(matrices, owners, costs, wave_bytes, world_size))


def _choose_modes(storage: Sequence[Layout], world_size: int, mode: TpModeT) -> list[_Mode]:
    count = len(storage)
    if world_size == 1:
        return ["duplicated"] * count
    if mode in ("blockwise", "duplicated", "exchange"):
        return [cast(_Mode, mode)] * count
    if mode == "distributed":
        return [_slabs_or_whole(layout, world_size) for layout in storage]
    in_place = [_stored_in_slabs(layout, world_size) for layout in storage]
    shared = GroupCosts.of(storage, in_place, world_size).cheapest()
    if shared is None:
        return ["duplicated"] * count
    modes: list[_Mode] = ["exchange"] * count
    for i in shared.tolist():
        modes[i] = "distributed"
    return modes


def _slabs_or_whole(layout: Layout, world_size: int) -> _Mode:
    """Choose between slabs and one owner, for a matrix whose work is to be shared.

    All ranks must call the same all-reduces, so each needs a slab.
    """
    return "distributed" if max(layout.shape) >= world_size else "exchange"


def _slabs(storage: Layout, world_size: int) -> Layout:
    """Cut the long side over the ranks: as stored, if that is balanced, else evenly."""
    if _stored_in_slabs(storage, world_size):
        return storage.compact()
    return Layout.slabs(storage.shape, _long_side(storage), range(world_size))


def _stored_in_slabs(storage: Layout, world_size: int) -> bool:
    """Tell whether a matrix is cut along its long side alone, about evenly over all ranks."""
    boxes, long = storage.boxes, _long_side(storage)
    across = boxes.width if long == 0 else boxes.height
    size = math.prod(storage.shape)
    once = int(boxes.area.sum()) == size and len(np.unique(boxes.rank)) == world_size
    if not once or np.any(across != storage.shape[1 - long]):
        return False
    return home(storage)[1] <= _IMBALANCE * size / world_size


def _long_side(storage: Layout) -> Literal[0, 1]:
    """Return the dimension to cut; of a square matrix the columns, as the iteration expects."""
    return 0 if storage.shape[0] > storage.shape[1] else 1


def _waves(
    matrices: Sequence[MatrixWork],
    owners: Int64Array,
    costs: Float64Array,
    wave_bytes: int,
    world_size: int,
) -> tuple[tuple[int, ...], ...]:
    """Make waves of one kind of work; slabs of equal cuts, so that all ranks stack them alike."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for i, work in enumerate(matrices):
        key: tuple[object, ...] = (work.mode,)
        if work.shared:
            key = (work.mode, work.compute.shape, *work.compute.held(world_size).tolist())
        kinds.setdefault(key, []).append(i)
    waves: list[tuple[int, ...]] = []
    for key, members in kinds.items():
        share = world_size if key[0] in ("distributed", "blockwise") else 1
        sizes = [math.prod(matrices[i].compute.shape) * _WORK_BYTES // share for i in members]
        planned = plan_waves(owners[members], costs[members].tolist(), sizes, max_bytes=wave_bytes)
        waves += [tuple(members[j] for j in wave) for wave in planned]
    return tuple(waves)
