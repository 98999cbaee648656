"""The names under which a checkpoint holds optimizer state.

Note [Keys]
    ``optimizer.state.{kind}.{parameter}`` is state with a number for each of a parameter's, in the
    parameter's unsharded shape, as megatron-core has it. Everything else belongs to a whole matrix:
    ``optimizer.matrix_state.{kind}.{parameter}[.{place} ...].{matrix}``, where places are those of
    leading dimensions such as the layer's, and ``matrix`` is its number in the parameter's split.
    Where an optimizer works on each tensor-parallel slab by itself ``.tp{rank}of{size}`` follows:
    such state has no meaning at another size.

    Megatron stacks the layers, or experts, of a model in one tensor. State that only some of them
    have, since others are frozen or have another optimizer, is no whole tensor: each has its own,
    ``optimizer.state.{kind}.{parameter}.{place}``, whose leading dimensions are 1.

    A kind has no dots: nested state has its path there,
    with slashes between the names, and dots, slashes and percent signs inside of a name escaped.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory

CHAINED = re.compile(r"chained_\d+\.")
"""Before the keys of one of several optimizers of megatron-core's."""

_OPTIMIZER = re.compile(
    rf"(?:{CHAINED.pattern})?optimizer\.(?:(matrix_|)state\.([^.]+)\.)?(.+?)(?:/shard_[\d.]+_[\d.]+)?"
)


class StateKey(NamedTuple):
    """An optimizer's key, taken apart: it names a parameter, or the place of a whole matrix.

    What holds buckets of many parameters, or settings, has no kind.
    """

    kind: str | None
    name: str
    of_matrix: bool


def split_key(key: str) -> StateKey | None:
    """Take the key of a tensor or object apart; None if it is none of an optimizer."""
    match = _OPTIMIZER.fullmatch(key)
    return None if match is None else StateKey(match[2], match[3], match[1] == "matrix_")


def kind_of(path: Sequence[str]) -> str:
    """Return the kind of a value that ``path`` leads to; different paths give different kinds."""
    escape = str.maketrans({"%": "%25", "/": "%2F", ".": "%2E"})
    return "/".join(name.translate(escape) for name in path)


def key_apart(key: str, places: Sequence[int]) -> str:
    """Return the key of what is at some places of the leading dimensions of a stacked tensor."""
    return ".".join([key, *map(str, places)])


def state_key(kind: str, parameter: str) -> str:
    """Return the key of state with a number for each of a parameter's."""
    return f"optimizer.state.{kind}.{parameter}"


def matrix_state_key(kind: str, place: str) -> str:
    """Return the key of other state of a matrix."""
    return f"optimizer.matrix_state.{kind}.{place}"


def tensors(sharded_state_dict: Any) -> Iterator[ShardedTensor]:
    """Yield this rank's sharded tensors, those that factories make included."""
    for value in nested_values(sharded_state_dict):
        if isinstance(value, ShardedTensor):
            yield value
        elif isinstance(value, ShardedTensorFactory):
            yield from tensors({"built": value.build()})


def saved_keys(sharded_state_dict: Any) -> set[str]:
    """Return the checkpoint's keys of this rank's sharded tensors and objects."""
    objects = (v for v in nested_values(sharded_state_dict) if isinstance(v, ShardedObject))
    found = {item.key for item in tensors(sharded_state_dict)}
    return found | {item.unique_key for item in objects}
