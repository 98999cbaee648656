"""What a sharded state dict reads or writes."""

from collections.abc import Iterator
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory

__all__ = ["keys", "tensors"]


def tensors(sharded_state_dict: Any) -> Iterator[ShardedTensor]:
    """Yield this rank's sharded tensors, those that factories make included."""
    for value in nested_values(sharded_state_dict):
        if isinstance(value, ShardedTensor):
            yield value
        elif isinstance(value, ShardedTensorFactory):
            yield from tensors({"built": value.build()})


def keys(sharded_state_dict: Any) -> set[str]:
    """Return the checkpoint's keys of this rank's sharded tensors and objects."""
    objects = (v for v in nested_values(sharded_state_dict) if isinstance(v, ShardedObject))
    found = {item.key for item in tensors(sharded_state_dict)}
    return found | {item.unique_key for item in objects}
