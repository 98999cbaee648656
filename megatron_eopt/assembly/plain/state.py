"""Optimizer state of any shape as entries of a sharded checkpoint, and back.

Note [Keys of plain checkpoints]
    State with a number for each of the parameter's is saved as megatron-core does, cut like the
    parameter, under ``optimizer.state.{state}.{parameter}``. All other state (Kronecker factors,
    row moments, numbers) is saved in pieces under
    ``optimizer.matrix_state.{state}.{parameter}[.{offset} ...].{part}``: offsets are those of
    prepended axes, such as the layer's number; ``part`` is the logical matrix in its split, 0 for
    an optimizer that takes the parameter as one. An element of a list has its index behind
    ``{state}``. Where the optimizer works on each tensor-parallel slab by itself,
    ``.tp{rank}of{size}`` follows: such state has no meaning at another size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import (
    ELEMENT_WISE_STATE,
    MATRIX_STATE_PREFIX,
    STATE_PREFIX,
    STEP,
)
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.storage.checkpoint.model_space import unique_name
from megatron_eopt.storage.parts import state_layout

__all__ = ["StoredState", "restore"]


@dataclass(frozen=True)
class StoredState:
    """How one parameter's state is written.

    Attributes:
        optimizer: The torch optimizer.
        main: The parameter it steps.
        shard: The model's checkpoint entry of the parameter.
        tp_rank: This rank among those that hold slabs of the parameter.
        tp_size: Their number, 1 for a parameter that is not cut.
    """

    optimizer: torch.optim.Optimizer
    main: Tensor
    shard: ShardedTensor | ShardedTensorFactory
    tp_rank: int
    tp_size: int

    def entries(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checkpoint entries of ``state``, its step apart."""
        entries = {name: self._entry(name, state[name]) for name in state if name != STEP}
        # dist_checkpointing cannot load an empty list
        return {name: entry for name, entry in entries.items() if entry != []}

    def has_slab_state(self, state: Mapping[str, Any]) -> bool:
        """Whether some of ``state`` has a meaning for this tensor-parallel size alone."""
        return self.tp_size > 1 and any(
            not self._is_alike(name, value) and not self._is_whole()
            for name, value in state.items()
            if name != STEP
        )

    def _entry(self, name: str, value: Any) -> Any:
        if self._is_alike(name, value):
            return make_sharded_optimizer_tensor(self.shard, value, f"{STATE_PREFIX}{name}")
        if isinstance(value, list | tuple):
            return [self._piece(f"{name}.{i}", 0, item) for i, item in enumerate(value)]
        parts = self._matrices(name, value)
        return [self._piece(name, i, item) for i, item in enumerate(parts) if _is_kept(item)]

    def _is_alike(self, name: str, value: Any) -> bool:
        if not isinstance(value, Tensor) or value.shape != self.main.shape:
            return False
        return name in ELEMENT_WISE_STATE or state_layout(self.optimizer) != "matrix_state"

    def _is_whole(self) -> bool:
        if not isinstance(self.optimizer, TensorParallelAdaptiveMuon):
            return False
        return self.optimizer.tp_mode != "blockwise"

    def _matrices(self, name: str, value: Any) -> Sequence[Any]:
        if name == "moment2_buffer" and isinstance(self.optimizer, TensorParallelAdaptiveMuon):
            return self.optimizer.statistics_of(self.main)
        return [value]

    def _piece(self, name: str, part: int, value: Any) -> ShardedTensor | ShardedObject:
        replica = self.shard.replica_id
        replica_id = replica if isinstance(replica, tuple) else (replica,)
        key = f"{MATRIX_STATE_PREFIX}{name}.{_place(self.shard)}.{part}"
        if self.tp_size > 1:
            if self._is_whole():
                replica_id = (*replica_id, self.tp_rank)
            else:
                key += f".tp{self.tp_rank}of{self.tp_size}"
        if not isinstance(value, Tensor):
            return ShardedObject(key, value, (1,), (0,), replica_id=replica_id)
        # a shard has at least one axis
        tensor = value.detach().view(value.shape or (1,))
        return ShardedTensor.from_rank_offsets(key, tensor, replica_id=replica_id)


def _is_kept(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.numel() > 0


def _place(shard: ShardedTensor | ShardedTensorFactory) -> str:
    tensor = shard
    while isinstance(tensor, ShardedTensorFactory):
        built = tensor.build()
        tensor = next(iter(nested_values(built if isinstance(built, dict | list) else [built])))
    return unique_name(shard.key, tensor)


def restore(template: Any, loaded: Any, what: str) -> Any:
    """Return a loaded state value in the form that the optimizer keeps it in.

    Args:
        template: The present value.
        loaded: What a checkpoint held: such a value, or the pieces of one.
        what: Its name, for the message.

    Raises:
        ConfigurationError: If it has another shape than the present value.
    """
    if isinstance(template, list | tuple):
        if isinstance(loaded, list | tuple) and len(loaded) == len(template):
            pairs = zip(template, loaded, strict=True)
            return type(template)(restore(mine, its, what) for mine, its in pairs)
        raise _other_shape(what, loaded, template)
    pieces = loaded if isinstance(loaded, list) else [loaded]
    if not isinstance(template, Tensor):
        value = pieces[0] if len(pieces) == 1 else None
        if value is None or (isinstance(value, Tensor) and value.numel() != 1):
            raise _other_shape(what, loaded, template)
        return type(template)(value)
    tensors = [
        piece if isinstance(piece, Tensor) else torch.as_tensor(piece, dtype=template.dtype)
        for piece in pieces
    ]
    in_pieces = isinstance(loaded, list) or not template.shape
    if in_pieces and sum(map(Tensor.numel, tensors)) == template.numel():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else template
        return flat.view(template.shape)
    if len(tensors) != 1 or tensors[0].shape != template.shape:
        raise _other_shape(what, loaded, template)
    return tensors[0]


def _other_shape(what: str, loaded: Any, template: Any) -> ConfigurationError:
    return ConfigurationError(
        "state_dict",
        f"{what} of {_describe(loaded)}",
        f"must be of {_describe(template)}",
        "Resume with the settings and the tensor-parallel size of the run that wrote the "
        "checkpoint, or start this state anew with checkpoint_fresh_state",
    )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"pieces [{', '.join(map(_describe, value))}]"
    return type(value).__name__
