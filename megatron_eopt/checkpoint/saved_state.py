"""The state values that an optimizer saves and loads, as pieces of a checkpoint.

Note [Saved state]
    In every storage, a state value consists of pieces: boxes of the unsharded parameter, or of a
    tensor for a logical matrix. ZeRO-1 fragments, tensor-parallel shards, whole parameters, DTensor
    shards and matrices on owner ranks differ only in their boxes. The replica id of a piece says
    which of the ranks with copies writes it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor

from megatron_eopt.base.address import address_of
from megatron_eopt.base.names import MAIN_KINDS
from megatron_eopt.checkpoint.catalogue import Catalogue
from megatron_eopt.checkpoint.keys import (
    kind_of,
    matrix_state_key,
    state_key,
)
from megatron_eopt.checkpoint.parameter_space import ParameterSpace
from megatron_eopt.checkpoint.sources import Boxes, MatrixSource, Piece, Pieces, find, key_of
from megatron_eopt.megatron_core.stored_weights import StoredWeights
from megatron_eopt.optimizers.update_rule import UnshardedState, UpdateRule
from megatron_eopt.state.rule import Writer
from megatron_eopt.storage.local_tensors import local_of
from megatron_eopt.storage.shard import ParamShard


@dataclass(frozen=True)
class ParameterLocation:
    """What all values of one parameter share: where they are, and which optimizer they belong to.

    Matrices on owner ranks have one of their own, since they have other copies.
    """

    space: ParameterSpace  # the place of its elements in checkpoints
    replica: tuple[int, ...]  # replica id; zeros for the copy that is written
    reader: Writer  # the optimizer
    optional: frozenset[str]  # kinds of state that a checkpoint may lack
    # the optimizer's state on this rank, with the step count
    state: dict[str, Any] | None = None
    stored: ParamShard | None = None  # what this rank stores; None for a matrix on its owner rank
    # returns its logical matrices, if it has several
    matrices: Callable[[], Sequence[MatrixSource]] = tuple

    @property
    def holds_first(self) -> bool:
        """Whether this rank stores the first element of the unsharded parameter."""
        item = self.stored
        return item is not None and self.space.has_first(item.start, item.stop)


@dataclass(frozen=True)
class StateValue:
    """One state value on this rank, with its place in a checkpoint.

    Main weights and state that is sharded like its parameter have ``flat``, all other state has
    ``kept``, and a step count has neither.
    """

    where: ParameterLocation  # the parameter
    kind: str  # kind of state
    pieces: Pieces  # the data of each is the tensor to write, or to read into
    stacked: int = 0  # leading dimensions of the pieces' tensors that index layers or experts
    flat: Tensor | None = None  # the flat local value, if it is sharded like its parameter
    kept: UnshardedState | None = None  # the value, if it is not sharded like its parameter
    homes: tuple[Tensor, ...] = ()  # where to copy what is read for each piece, if not its data

    @property
    def is_count(self) -> bool:
        """Whether it is a step count that may differ from the common one."""
        return self.flat is None and self.kept is None

    @property
    def is_of_model(self) -> bool:
        """Whether it is main weights that are the model's own weights."""
        item = self.where.stored
        return self.kind in MAIN_KINDS and item is not None and item.main is item.param

    def found_in(
        self, catalogue: Catalogue, boxes: Boxes, kind: str | None = None
    ) -> "StateValue | None":
        """Return this value where a checkpoint has it, maybe as another kind; None without it."""
        found = [
            find(
                catalogue,
                boxes,
                piece,
                self.kind,
                kind or self.kind,
                self.stacked,
                self.where.matrices,
            )
            for piece in self.pieces
        ]
        pieces = tuple(piece for piece in found if piece is not None)
        return replace(self, pieces=pieces) if len(pieces) == len(found) else None

    def misfit_in(self, catalogue: Catalogue) -> str:
        """Return how a checkpoint's value, which cannot be read, differs from this one."""
        for piece in self.pieces:
            for full in catalogue.tensor_keys(key_of(piece)):
                if (shape := catalogue.shapes[full]) != tuple(piece.global_shape):
                    return f"of shape {shape} must have shape {tuple(piece.global_shape)}"
        return "is of other matrices, or of another tensor-parallel size"

    def dtypes_in(self, catalogue: Catalogue) -> Iterator[tuple[torch.dtype, torch.dtype]]:
        """Yield a checkpoint's dtype and this run's of a value that a load converts."""
        for piece in self.pieces[:1] if self.flat is not None else ():
            for full in catalogue.tensor_keys(key_of(piece)):
                saved = catalogue.values[full].dtype
                if saved is not None and saved != piece.data.dtype:
                    yield saved, piece.data.dtype

    @property
    def _homes(self) -> tuple[Any, ...]:
        """Where what is loaded for each piece belongs."""
        return self.homes or tuple(piece.data for piece in self.pieces)

    def apart_from_model(self) -> "StateValue":
        """Return this value with memory of its own to read into, if it is a weight of the model.

        The model's state is read into that weight, too, and may have been rounded to 16 bits.
        """
        item = self.where.stored
        if self.kind not in MAIN_KINDS or item is None:
            return self
        main, param = (address_of(local_of(tensor))[0] for tensor in (item.main, item.param))
        if main != param:
            return self
        own = tuple(replace(piece, data=torch.empty_like(piece.data)) for piece in self.pieces)
        return replace(self, pieces=own, homes=tuple(piece.data for piece in self.pieces))

    def write_loaded(self, loaded: Sequence[Any]) -> None:
        """Write what was loaded for each piece into the state, unless it was loaded in place."""
        for piece, home, value in zip(self.pieces, self._homes, loaded, strict=True):
            if isinstance(piece, ShardedObject):
                assert self.kept is not None
                self.kept.replace(value)
            # megatron-core loads tensors in place; what a factory has merged, or a rank's file has,
            # is another tensor
            elif address_of(value) != address_of(home):
                home.copy_(value.view(home.shape))

    def take_from_model(self) -> None:
        """Copy the model's weights to the main weights."""
        item = self.where.stored
        assert item is not None
        assert self.flat is not None
        self.flat.copy_(item.held_of(item.param))


def sharded_value(kind: str, value: Tensor, where: ParameterLocation) -> StateValue:
    """Return the value of main weights or state that are sharded like the parameter."""
    assert where.stored is not None
    flat = value.detach().reshape(-1)
    pieces = where.space.pieces(kind, flat, where.stored.start, where.replica)
    return StateValue(where, kind, tuple(pieces), where.space.prepended, flat)


def unsharded_value(kept: UnshardedState, where: ParameterLocation, count: int) -> StateValue:
    """Return the value of state that is not sharded like its parameter.

    ``count`` is the number of logical matrices of the parameter.
    """
    kind = kind_of(kept.path)
    base, prepended = where.space.sharded, where.space.prepended
    whole = tuple(base.global_shape[prepended:])
    # one matrix, saved under one key, with an element for each of the parameter's
    is_parameters = kept.per_element and count == len(where.space.keys) == 1
    if is_parameters and tuple(kept.value.shape) == whole:
        # the same form as in storages that do not redistribute matrices
        key = state_key(kind, base.key)
        value = kept.value.view((*(1,) * prepended, *whole))
        offset = (*where.space.stack_index, *(0 for _ in whole))
    else:
        key = matrix_state_key(kind, where.space.name, (kept.matrix, count), kept.slab)
        prepended, value, offset = 0, kept.value, ()
    # ranks of one replica may hold the value, too, and only one of them writes it
    replica = (*where.replica, int(not kept.writes))
    piece: Piece = ShardedObject(key, value, (1,), (0,), replica_id=replica)
    if isinstance(value, Tensor):
        # tensors in checkpoints need at least one dimension
        data = value.detach().view(value.shape or (1,))
        shape, offset = tuple(data.shape), offset or (0,) * data.dim()
        whole = base.global_shape if prepended else shape
        piece = ShardedTensor(key, data, data.dtype, shape, whole, offset, None, replica)
    return StateValue(where, kind, (piece,), prepended, kept=kept)


def sharded_like_weights(
    storage: StoredWeights, update_rule: UpdateRule, number: int
) -> dict[str, Tensor]:
    """Return main weights and state that are sharded like the parameter, by kind."""
    # momentum of 8 or 16 bits is saved in the form of float32 momentum
    main = update_rule.shards[number].main
    assert main is not None
    tensors = update_rule.saved_form(number, storage.tensors_of(update_rule.shards[number]))
    return {
        kind: value
        for kind, value in tensors.items()
        if kind in MAIN_KINDS or update_rule.is_sharded_like_param(kind, value, main)
    }


def unsharded_state_of(
    storage: StoredWeights,
) -> Iterator[tuple[UpdateRule, Tensor, UnshardedState]]:
    """Yield state that is not sharded like its parameter, with its update rule and parameter."""
    for assigned in storage.assigned:
        update_rule = assigned.rule
        with assigned.groups_and_state() as (groups, state):
            for item in update_rule.unsharded_state(groups, state):
                yield update_rule, update_rule.shards[item.shard].param, item
