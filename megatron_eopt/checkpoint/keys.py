"""The names under which a checkpoint holds optimizer state.

Note [Keys]
    ``optimizer.state.{kind}.{parameter}`` is state with a number for each of a parameter's, in the
    parameter's unsharded shape, as megatron-core has it. Everything else belongs to a whole matrix:
    ``optimizer.matrix_state.{kind}.{parameter}[.{place} ...].{matrix}of{count}``, where places are
    those of leading dimensions such as the layer's, and ``matrix`` is its number of all in the
    parameter's split. Where an optimizer works on each tensor-parallel slab by itself
    ``.tp{rank}of{size}`` follows: such state has no meaning at another size.

    Megatron stacks the layers, or experts, of a model in one tensor. State that only some of them
    have, since others are frozen or have another optimizer, is no whole tensor: each has its own,
    ``optimizer.state.{kind}.{parameter}.{place}``, whose leading dimensions are 1.

    A kind has no dots: nested state has its path there,
    with slashes between the names, and dots, slashes and percent signs inside of a name escaped.

    megatron-core may put ``chained_{number}.``, an optimizer's place in its chain, before all that.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

_KEY = re.compile(
    r"(?P<chain>chained_\d+\.)?optimizer\."
    r"(?:state\.(?P<kind>[^.]+)\.(?P<name>.+?)"
    r"|matrix_state\.(?P<other>[^.]+)\.(?P<place>.+?)\.\d+of\d+(?:\.tp\d+of(?P<slabs>\d+))?"
    r"|(?P<rest>.+?))(?:/shard_[\d.]+_[\d.]+)?"
)


class StateKey(NamedTuple):
    """An optimizer's key, taken apart."""

    chain: str  # what names a place in a chain; empty where nothing does
    kind: str | None  # the kind of state; None for buckets of many parameters, and for settings
    name: str  # the parameter, with its places in a stack
    of_matrix: bool  # whether it is state of a whole matrix
    slabs: int  # how many tensor-parallel slabs there are of which it belongs to one; 0 for none


def split_key(key: str) -> StateKey | None:
    """Take the key of a tensor or object apart; None if it is none of an optimizer."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    kind, name = match["kind"] or match["other"], match["name"] or match["place"] or match["rest"]
    slabs = int(match["slabs"] or 0)
    return StateKey(match["chain"] or "", kind, name, match["other"] is not None, slabs)


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


def matrix_state_key(
    kind: str, parameter: str, matrix: tuple[int, int], slab: tuple[int, int] | None = None
) -> str:
    """Return the key of other state of a matrix: (number, count), or of a slab: (rank, size)."""
    place = "{}of{}".format(*matrix) + ("" if slab is None else ".tp{}of{}".format(*slab))
    return f"optimizer.matrix_state.{kind}.{parameter}.{place}"


def tensors(sharded_state_dict: Any) -> Iterator[ShardedTensor]:
    """Yield this rank's sharded tensors, those that factories make included."""
    for value in nested_values(sharded_state_dict):
        if isinstance(value, ShardedTensor):
            yield value
        elif isinstance(value, ShardedTensorFactory):
            yield from tensors({"built": value.build()})
