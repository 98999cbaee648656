"""Save and load the small model, in the form that its storage has in Megatron's trainers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
    preprocess_state_dict_for_uneven_dtensor,
)
from torch import Tensor, distributed
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megatron_eopt import checkpoints
from megatron_eopt.base.place import declared_box
from megatron_eopt.storage.local_tensors import local_of
from megatron_eopt.storage.uneven import is_uneven
from megatron_eopt.testing.stored_models import SHAPES, named_params
from megatron_eopt.wrappers.chain import OptimizerChain


def state_of(chunk: Any, chain: OptimizerChain, *, is_loading: bool) -> dict[str, Any]:
    """Return what is saved, or loaded."""
    params = dict(named_params(chunk))
    if any(map(is_uneven, params.values())):
        how = {"distrib_optim_sharding_type": "fsdp_dtensor"}
        state = chain.sharded_state_dict(params, is_loading=is_loading, metadata=how)
        prepared: dict[str, Any] = {"model": params, "optimizer": state}
        preprocess_state_dict_for_uneven_dtensor(prepared)
        return prepared
    model, its = ({name: _saved(name, p) for name, p in params.items()} for _ in range(2))
    how = {"distrib_optim_sharding_type": "fully_reshardable"}
    state = chain.sharded_state_dict(its, is_loading=is_loading, metadata=how)
    return {"model": model, "optimizer": state}


def save_state(state: dict[str, Any], folder: str) -> None:
    """Save what :func:`state_of` returned."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    if _is_of_tensors(state):
        save(state, checkpoint_id=folder)
    else:
        dist_checkpointing.save(state, folder)


def load_state(state: dict[str, Any], folder: str) -> Any:
    """Return what was saved, in the form of this run's :func:`state_of`."""
    if not _is_of_tensors(state):
        return checkpoints.load(state, folder)
    load(state, checkpoint_id=folder)
    return state


def _is_of_tensors(state: Mapping[str, Any]) -> bool:
    """Return whether torch saves a state and loads it in place, and not megatron-core."""
    return all(isinstance(value, Tensor) for value in state["model"].values())


def _saved(name: str, param: Tensor) -> ShardedTensor:
    place, local, shape = declared_box(param), local_of(param), SHAPES[name]
    offset = (0,) * len(shape) if place is None else place.offset
    if isinstance(param, DTensor):
        local = param._local_tensor
        _, offset = compute_local_shape_and_global_offset(
            shape, param.device_mesh, param.placements
        )
    # of copies, one is saved
    is_copy = getattr(param, "shared", False) if place is not None else local.shape == shape
    replica = (0, 0, distributed.get_rank() if is_copy else 0)
    return ShardedTensor(
        name, local, local.dtype, tuple(local.shape), shape, tuple(offset), None, replica
    )
