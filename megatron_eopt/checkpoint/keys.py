"""The keys of optimizer state in checkpoints.

Note [Keys]
    ``optimizer.state.{kind}.{parameter}`` is state in the parameter's unsharded shape, as in
    megatron-core. All other state belongs to one logical matrix:
    ``optimizer.matrix_state.{kind}.{parameter}[.{index} ...].{matrix}of{count}``. Indices are those
    in leading dimensions, such as the layer's, and ``matrix`` is the index in the parameter's
    split. If an optimizer updates each tensor-parallel shard separately, ``.tp{rank}of{size}``
    follows, because this state is not valid for another size.

    Megatron stacks the layers, or experts, of a model in one tensor. If only some of them have a
    kind of state, because others are frozen or have another optimizer, each gets its own tensor
    ``optimizer.state.{kind}.{parameter}.{index}``, with leading dimensions of size 1.

    megatron-core's Adam may be saved by bucket, without names of parameters (buckets.py).

    A kind has no dots. For nested state it is the path, joined by slashes; dots, slashes and
    percent signs in names are escaped.

    megatron-core may prepend ``chained_{number}.``, the index of an optimizer in its chain.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

_KEY = re.compile(
    r"(?P<chain>chained_\d+\.)?optimizer\."
    r"(?:state\.(?P<kind>[^.]+)\.(?P<name>.+?)"
    r"|matrix_state\.(?P<other>[^.]+)\.(?P<stacked>.+?)\.\d+of\d+(?:\.tp\d+of(?P<slabs>\d+))?"
    # objects have the number of their shard behind the key (``ShardedObject.unique_key``)
    r"|(?P<rest>.+?))(?:/shard_[\d.]+_[\d.]+)?"
)


class Saved(NamedTuple):
    """A tensor or an object of a checkpoint: what its key says, and what the metadata says."""

    kind: str | None  # of optimizer state; None for the model's tensors, settings and the like
    name: str  # the parameter's, with its index in a stack, or what the format calls it
    shape: tuple[int, ...] | None = None  # of the whole tensor; None for an object
    dtype: torch.dtype | None = None
    cuts: tuple[int, ...] = ()  # into how many pieces each dimension is cut
    of_matrix: bool = False  # whether it is state of a logical matrix
    slabs: int = 0  # tensor-parallel size if it belongs to one shard; else 0
    in_bucket: bool = False  # whether it has a kind of state of many parameters
    chain: str = ""  # prefix of the key with the index in a chain


def split_key(key: str) -> Saved | None:
    """Return what a key says; None if it is not an optimizer's.

    Buckets of many parameters have no kind yet, see ``catalogue.by_key``.
    """
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    kind, name = match["kind"] or match["other"], match["name"] or match["stacked"] or match["rest"]
    slabs, chain = int(match["slabs"] or 0), match["chain"] or ""
    return Saved(kind, name, of_matrix=match["other"] is not None, slabs=slabs, chain=chain)


def kind_of(path: Sequence[str]) -> str:
    """Return the kind of the value at ``path``; different paths give different kinds."""
    escape = str.maketrans({"%": "%25", "/": "%2F", ".": "%2E"})
    return "/".join(name.translate(escape) for name in path)


def unstacked_key(key: str, index: Sequence[int]) -> str:
    """Return the key of the entry at an index of a stacked tensor's leading dimensions."""
    return ".".join([key, *map(str, index)])


def state_key(kind: str, parameter: str) -> str:
    """Return the key of state in the parameter's shape."""
    return f"optimizer.state.{kind}.{parameter}"


def matrix_state_key(
    kind: str, parameter: str, matrix: tuple[int, int], slab: tuple[int, int] | None = None
) -> str:
    """Return the key of other state of a matrix (index, count), maybe of a shard (rank, size)."""
    suffix = "{}of{}".format(*matrix) + ("" if slab is None else ".tp{}of{}".format(*slab))
    return f"optimizer.matrix_state.{kind}.{parameter}.{suffix}"


def tensors(sharded_state_dict: Any) -> Iterator[ShardedTensor]:
    """Yield this rank's sharded tensors, including those that factories build."""
    for value in nested_values(sharded_state_dict):
        if isinstance(value, ShardedTensor):
            yield value
        elif isinstance(value, ShardedTensorFactory):
            yield from tensors({"built": value.build()})
