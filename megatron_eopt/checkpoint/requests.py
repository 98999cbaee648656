"""The state that a chain of optimizers saves or loads with ``dist_checkpointing``."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica
from torch import Tensor

from megatron_eopt.base.agreement import gather_unique, totals
from megatron_eopt.base.names import MAINS, STEP
from megatron_eopt.checkpoint import saved_state
from megatron_eopt.checkpoint.bucket_order import RankOrder
from megatron_eopt.checkpoint.buckets import BucketSpace
from megatron_eopt.checkpoint.catalogue import Catalogue, by_key
from megatron_eopt.checkpoint.contents import Contents, unstacked
from megatron_eopt.checkpoint.continuation import (
    MAXIMA,
    Note,
    Policy,
    Reader,
    missing_state,
    of_other_weights,
)
from megatron_eopt.checkpoint.keys import Saved, matrix_state_key
from megatron_eopt.checkpoint.migration import choose
from megatron_eopt.checkpoint.parameter_space import MatrixPart, ParameterSpace, parameter_spaces
from megatron_eopt.checkpoint.saved_groups import optimizer_of
from megatron_eopt.checkpoint.sources import Source
from megatron_eopt.optimizers.storage import Storage
from megatron_eopt.optimizers.update_rule import OF_GROUPS, UpdateRule, set_step


class StateRequests:
    """The ``param_state`` part of a sharded state dict: the state of all parameters.

    Args:
        storages: The optimizers of the chain.
        model_state: The model's ``sharded_state_dict``, with the parameters themselves as data.
        counts: For saving, the step count of each update rule's state; None for loading.
        policy: What may differ from the checkpoint, according to the configuration.
        by_bucket: Whether to request state by bucket, until :meth:`adapt` knows the checkpoint.
        order: Returns the parameters of this rank in megatron-core's order.

    Raises:
        ConfigurationError: If a parameter is not in the model's state.
    """

    def __init__(
        self,
        storages: Sequence[Storage],
        model_state: Mapping[str, Any],
        counts: Mapping[UpdateRule, int] | None,
        policy: Policy,
        *,
        by_bucket: bool = False,
        order: Callable[[], RankOrder] | None = None,
    ) -> None:
        self.policy = policy
        self.order = order
        self._counts = counts
        groups = (g for s in storages if s.update_rules for g in s.optimizer.param_groups)
        self._optimizers = {name for group in groups if (name := optimizer_of(group))}
        self._has_stepped = any(storage.steps > 0 for storage in storages)
        self._buckets = bucket_spaces(storages)
        # keys that identify the parameters in them
        self.bucket_names = [space.params_name for space in self._buckets.values()]
        # keys and names of the parameters of all ranks, by the identity of their group
        self.members: dict[str, set[str]] = {}
        # the index of a value names it in the state dict. Ranks need not agree on it, because a
        # checkpoint goes by the keys of the pieces
        self._values = [
            value for storage in storages for value in self._values_of(storage, model_state)
        ]
        # a load that :meth:`adapt` does not match asks for what this run would save
        contents = self._as_by_bucket(model_state) if by_bucket else None
        self._chosen = {
            index: (contents and value.found_in(contents, value.kind)) or value
            for index, value in enumerate(self._values)
            # a load asks for counts of single parameters only where ``adapt`` finds some
            if not (value.is_count and counts is None)
        }
        self.param_state: dict[str, Any] = {}
        # groups and loss scale beside buckets: what asks for them, and what a checkpoint has
        self._beside = {str(n): its.common() for n, its in self._buckets.items() if by_bucket}
        self.common: Sequence[Mapping[str, Any]] = ()
        self._by_order = False  # whether the checkpoint's buckets have no names of parameters

    def unstack_partial(self) -> None:
        """Unstack state that only some layers or experts of a stack have; collective."""
        written: dict[str, int] = {}
        whole: dict[str, int] = {}
        stacked = {
            index: value
            for index, value in self._chosen.items()
            if value.stacked and not value.is_in_bucket
        }
        for piece in (piece for value in stacked.values() for piece in value.pieces):
            # copies are not written, so they do not count
            size = math.prod(piece.local_shape) if is_main_replica(piece.replica_id) else 0
            written[piece.key] = written.get(piece.key, 0) + size
            whole[piece.key] = math.prod(piece.global_shape)
        # a rank knows only its own layers, and sums need equal lists on all ranks
        keys = gather_unique(sorted(written))
        sizes = zip(keys, totals([written.get(key, 0) for key in keys]), strict=True)
        # torch refuses to save a tensor that the pieces of all ranks do not fill
        parts = {key for key, size in sizes if size < whole.get(key, 0)}
        for index, value in stacked.items():
            if any(piece.key in parts for piece in value.pieces):
                self._chosen[index] = replace(value, pieces=unstacked(value.pieces, value.stacked))
        self._update_param_state()

    def adapt(self, catalogue: Catalogue, policy: Policy) -> list[Note]:
        """Request only what a checkpoint has, if the policy allows the difference.

        Call it before loading, because ``dist_checkpointing.load`` fails if a key is missing.

        Returns:
            What starts fresh or is read from another source.

        Raises:
            ConfigurationError: If state is missing; names the parameters and kinds.
        """
        self._beside, self.common = {}, catalogue.bucket_common
        self._by_order = not catalogue.bucket_names
        contents = Contents(catalogue, self._optimizers)
        self._chosen, notes = choose(self._values, contents, policy, has_stepped=self._has_stepped)
        self._update_param_state()
        return notes

    def check(self, loaded: Mapping[str, Any]) -> None:
        """Raise a ConfigurationError if requested state is not in the loaded ``param_state``."""
        present = self._complete_values(loaded)
        absent = [self._values[index] for index in self._chosen.keys() - present.keys()]
        may_lack = self.policy.fresh | MAINS
        missing = [(v.where.space.name, v.kind, "") for v in absent if v.kind not in may_lack]
        if missing:
            raise missing_state(sorted(missing))
        for index in present if self._by_order else ():
            value = self._chosen[index]
            if value.kind in MAINS and value.is_in_bucket and not value.is_models(present[index]):
                raise of_other_weights(value.where.space.name)

    def _complete_values(self, loaded: Mapping[str, Any]) -> dict[int, list[Any]]:
        """Return what was loaded for all pieces of a value, by its index."""
        values = loaded.get("values", {})
        found = {}
        for index, value in self._chosen.items():
            # the load may have reordered them
            its, names = values.get(str(index), {}), map(str, range(len(value.pieces)))
            # a value of which a piece is missing counts as missing
            if len(its) == len(value.pieces):
                found[index] = [its[name] for name in names]
        return found

    @torch.no_grad()
    def take(self, loaded: Mapping[str, Any]) -> None:
        """Write the loaded ``param_state`` into the optimizers' state, after :meth:`check`.

        Step counts of single parameters in the checkpoint override the common one, and state that
        starts fresh counts from 0.
        """
        present = self._complete_values(loaded)
        for index, value in enumerate(self._values):
            if value.is_count:
                continue
            if index in present:
                self._chosen[index].take(present[index])
            elif value.kind in MAINS:
                # the checkpoint has no main weights, so the loaded model's weights are used
                value.take_from_model()
            elif value.where.state is not None and value.kind not in MAXIMA:
                set_step(value.where.state, 0)
        # last, because these replace the common count, which ``adopt_common`` has set
        for index, pieces in present.items():
            if self._values[index].is_count:
                set_step(self._values[index].where.state or {}, int(pieces[0]))

    def _update_param_state(self) -> None:
        """Write the chosen pieces into the state dict."""
        # in place, because the state dict that the caller has built refers to this dictionary
        self.param_state.clear()
        self.param_state["values"] = {
            str(index): {str(number): piece for number, piece in enumerate(value.pieces)}
            for index, value in self._chosen.items()
            if value.pieces
        }
        if self._beside:
            self.param_state["buckets"] = self._beside

    def _as_by_bucket(self, model_state: Mapping[str, Any]) -> Contents:
        """Return what a checkpoint by bucket has that this run would save."""
        kinds = {value.kind for value in self._values if not value.is_count}
        boxes: dict[str, list[Source]] = {}
        values: dict[str, Saved] = {}
        for space in self._buckets.values():
            for key, size, source in space.boxes(model_state):
                bucket = space.prefixes[0] + source.key
                boxes.setdefault(key, []).append(replace(source, key=bucket))
                names = (f"{bucket}.{kind}" for kind in kinds)
                values |= {name: by_key(name, (size,)) for name in names}
        return Contents(Catalogue("torch_dist", values, bucket_boxes=boxes))

    def _values_of(
        self, storage: Storage, model_state: Mapping[str, Any]
    ) -> Iterator[saved_state.StateValue]:
        """Yield all state values on this rank of one optimizer of the chain.

        First main weights and state that are sharded like their parameter, each followed by the
        parameter's step count. Then all other state, such as that of whole matrices on their
        owners, with its counts.
        """
        stored = [
            (item.rule, number, group, item.rule.shards[number])
            for item in storage.assigned
            for group, _, number in item.rule.numbered(item.groups())
        ]
        groups_of = {item.rule: item.groups() for item in storage.assigned}
        states = {
            (update_rule, number): storage.optimizer.state[shard.main]
            for update_rule, number, _, shard in stored
        }
        unsharded = list(saved_state.unsharded_state_of(storage))
        # a rank may own a matrix of which it stores no part
        params = dict.fromkeys(
            [shard.param for *_, shard in stored] + [param for _, param, _ in unsharded]
        )
        spaces = parameter_spaces(model_state, params)
        for update_rule, number, group, item in stored:
            tensors = saved_state.sharded_like_weights(storage, update_rule, number)
            space = spaces[item.param]
            where = saved_state.ParameterLocation(
                space,
                storage.replica_of(item.param, space.sharded.replica_id),
                Reader.of(update_rule.name, group),
                states[update_rule, number],
                item,
                self._matrices_of(space, item.param, update_rule, number),
            )
            for kind, tensor in tensors.items():
                yield saved_state.sharded_value(kind, tensor, where)
            yield from self._count(update_rule, where, (0, 1), writes=where.holds_first)
        # several values share one state with one count, which is requested once
        counted = {id(state) for state in states.values()}
        # boxes of the matrices of a parameter, by matrix
        parts_of: dict[tuple[UpdateRule, int], defaultdict[int, list[MatrixPart]]] = {}
        for update_rule, param, its in unsharded:
            state = states.get((update_rule, its.shard))
            if update_rule.counts_matrices or state is None:
                # a count for each matrix is beside the value, and so is a parameter's on an owner
                # that stores no part of it
                state = its.container
            # a counter of the whole group is a value like others, and no state has it
            if its.path[0] == OF_GROUPS:
                state = None
            replica = storage.replica_of_matrix(param, spaces[param].sharded.replica_id)
            count = max(1, len(update_rule.shards[its.shard].layouts))
            group = groups_of[update_rule][update_rule.group_of[its.shard]]
            reader = Reader.of(update_rule.name, group)
            if its.per_element and (update_rule, its.shard) not in parts_of:
                found = self._matrices_of(spaces[param], param, update_rule, its.shard)
                by_matrix = parts_of[update_rule, its.shard] = defaultdict(list)
                for part in found:
                    by_matrix[part.matrix[0]].append(part)
            parts = parts_of[update_rule, its.shard][its.matrix] if its.per_element else ()
            where = saved_state.ParameterLocation(
                spaces[param], replica, reader, state, matrices=parts
            )
            yield saved_state.unsharded_value(its, where, count)
            if id(state) not in counted:
                counted.add(id(state))
                if update_rule.counts_matrices:
                    matrix = its.matrix, count
                    yield from self._count(update_rule, where, matrix, writes=its.writes)
                else:
                    # a parameter's count is written by the rank that stores its first element
                    yield from self._count(update_rule, where, (0, 1), writes=False)

    def _matrices_of(
        self, space: ParameterSpace, param: Tensor, update_rule: UpdateRule, number: int
    ) -> Sequence[MatrixPart]:
        """Return a parameter's logical matrices to load from, if it has several."""
        shard = update_rule.shards[number]
        if self._counts is not None or shard.slab or len(shard.layouts) < 2:
            return ()
        return tuple(space.matrices(param, shard.split))

    def _count(
        self,
        update_rule: UpdateRule,
        where: saved_state.ParameterLocation,
        matrix: tuple[int, int],
        *,
        writes: bool,
    ) -> Iterator[saved_state.StateValue]:
        """Yield the step count of a matrix; for saving, only if it differs from the update rule's.

        A parameter's count is that of matrix 0 of 1.
        """
        steps = None if where.state is None else where.state.get(STEP)
        # also None if another rank, the owner, has the count
        if steps is not None and (self._counts is None or int(steps) != self._counts[update_rule]):
            key = matrix_state_key(STEP, where.space.name, matrix)
            replica = (*where.replica, int(not writes))
            count = ShardedObject(key, int(steps), (1,), (0,), replica_id=replica)
            yield saved_state.StateValue(where, STEP, (count,))


def bucket_spaces(storages: Sequence[Storage]) -> dict[int, BucketSpace]:
    """Return the bucket spaces of a chain's optimizers with ZeRO-1 fragments, by their index."""
    spaces = {}
    for number, storage in enumerate(storages):
        if storage.in_buffers and not storage.is_stub_optimizer:
            chained = f"chained_{number}."
            # the writer may have had another number of optimizers, and one alone has no prefix
            likely = (chained, "") if len(storages) > 1 else ("", chained)
            spaces[number] = BucketSpace(storage, likely[: 2 if number == 0 else 1])
    return spaces
