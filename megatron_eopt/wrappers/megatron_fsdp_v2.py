"""Support for Megatron-FSDP's second version, ``fully_shard`` of ``megatron_fsdp.experimental``.

It puts all parameters of a module into one flat buffer, a unit, and cuts the buffer between rows.
So a rank has any number of rows of a parameter, perhaps none. Their DTensors do not tell which
rows, but the layout of the buffer does, the same on all ranks.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.base.upstream import require_upstream
from megatron_eopt.layouts import Layout, block_layout
from megatron_eopt.optimizers.dtensor_optimizer import DTensorOptimizer
from megatron_eopt.storage.local_tensors import unit_of

type Int64Array = npt.NDArray[np.int64]


def units(params: Iterable[Tensor]) -> list[Any]:
    """Return the units of parameters, in the order of the model on all ranks."""
    return list(dict.fromkeys(unit for param in params if (unit := unit_of(param)) is not None))


def take_attributes(params: Iterable[Tensor]) -> bool:
    """Give DTensors what was set on the whole parameters; return whether there are any units.

    ``fully_shard`` replaces parameters without their attributes, such as a declared split.
    """
    found = units(params)
    for unit in found:
        for whole, shard in zip(unit.unsharded_parameters, unit.sharded_parameters, strict=True):
            # what was set later, on the DTensor, counts
            vars(shard).update({**vars(whole), **vars(shard)})
    return bool(found)


def layout_in_unit(param: DTensor, mesh: Int64Array, cols: int, name: str) -> Layout:
    """Return the layout of a parameter whose mesh has these ranks; all copies are sources."""
    unit, shape = unit_of(param), param.shape
    weights = unit.main_weight
    number = [id(shard) for shard in unit.sharded_parameters].index(id(param))
    starts, stops = _ranges(weights.layout, weights.placements, mesh.shape)
    # from elements of the buffer to rows of this parameter
    before, per_row = weights.layout.tensor_to_offset[number], shape[1:].numel()
    low = np.zeros((mesh.size, len(shape)), np.int64)
    high = np.tile(np.array(shape, np.int64), (mesh.size, 1))
    low[:, 0] = np.clip(starts - before, 0, shape.numel()) // per_row
    high[:, 0] = np.clip(stops - before, 0, shape.numel()) // per_row
    sources = np.ones(mesh.size, bool)
    return block_layout(shape, low, high, mesh.ravel(), sources, cols=cols, name=name)


class _Seat(NamedTuple):
    """A device mesh as one of its ranks sees it."""

    shape: tuple[int, ...]
    place: tuple[int, ...]

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def get_local_rank(self, axis: int) -> int:
        return self.place[axis]


@lru_cache(maxsize=256)
def _ranges(
    layout: Any, placements: tuple[Any, ...], mesh_shape: tuple[int, ...]
) -> tuple[Int64Array, Int64Array]:
    """Return where the part of each rank begins and ends in a unit's buffer."""
    seats = (_Seat(mesh_shape, place) for place in np.ndindex(*mesh_shape))
    parts = np.array([layout.get_local_range(seat, placements) for seat in seats], np.int64)
    return parts[:, 0], parts.sum(axis=1)


class UnitsOptimizer(DTensorOptimizer):
    """Steps the units of a model; works with and without ``fully_shard_optimizer``."""

    def _step(self) -> None:
        super()._step()
        self._compute_with_main_weights()

    def _compute_with_main_weights(self) -> None:
        """Copy main weights to the weights that the model computes with."""
        for unit in units(self.names):
            unit.sync_model_weight_from_main_weight()

    def state_dict(self) -> dict[str, Any]:
        """Return groups and state for torch's distributed checkpoints; collective."""
        prepared = require_upstream("preprocess_state_dict_for_uneven_dtensor")
        state: dict[str, Any] = prepared(super().state_dict())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and state, and update the weights that the model computes with.

        Raises:
            ConfigurationError: If state of a parameter is missing.
        """
        super().load_state_dict(state_dict)
        self._compute_with_main_weights()
