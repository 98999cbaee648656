"""The state that a chain of optimizers saves or loads with ``dist_checkpointing``."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_pg_rank

from megatron_eopt.base.agreement import CheckpointError, gather_unique, totals
from megatron_eopt.base.names import MAIN_KINDS, STEP
from megatron_eopt.base.place import remat_size
from megatron_eopt.checkpoint import saved_state
from megatron_eopt.checkpoint.buckets import boxes_in_buckets
from megatron_eopt.checkpoint.catalogue import Catalogue
from megatron_eopt.checkpoint.keys import matrix_state_key, unstacked_key
from megatron_eopt.checkpoint.parameter_space import ParameterSpace, parameter_spaces
from megatron_eopt.checkpoint.saved_state import ParameterLocation, StateValue
from megatron_eopt.checkpoint.sources import Boxes, MatrixSource, unstacked
from megatron_eopt.megatron_core.stored_weights import StoredWeights
from megatron_eopt.optimizers.update_rule import OF_GROUPS, UpdateRule, set_step
from megatron_eopt.routing.groups import GROUP_ID
from megatron_eopt.state.groups import IN_ROWS_OF_MODEL, Groups
from megatron_eopt.state.rule import Kinds, LoadReport, SavedState, Writer, state_kinds
from megatron_eopt.storage.local_tensors import local_of


class StateRequests:
    """The ``param_state`` part of a sharded state dict: the state of all parameters.

    Args:
        storages: The optimizers of the chain.
        model_state: The model's ``sharded_state_dict``, with the parameters themselves as data.
        counts: For saving, the step count of each update rule's state; None for loading.
        model_chunks: This rank's model chunks, whose parameters may be in buckets.

    Raises:
        ConfigurationError: If a parameter is not in the model's state.
    """

    def __init__(
        self,
        storages: Sequence[StoredWeights],
        model_state: Mapping[str, Any],
        counts: Mapping[UpdateRule, int] | None,
        model_chunks: Sequence[Any] = (),
    ) -> None:
        self._counts = counts
        self._storages, self._model = storages, (model_chunks, model_state)
        self.has_stepped = any(storage.steps > 0 for storage in storages)
        shards = (shard for storage in storages for shard in storage.shards)
        self.is_rematerialized = any(remat_size(shard.param) > 1 for shard in shards)
        # keys and names of the parameters of all ranks, by the identity of their group
        self.members: dict[str, set[str]] = {}
        # groups and loss scale of the checkpoint, once :meth:`adapt` knows it
        self.groups: Groups | None = None
        self.common: Sequence[Mapping[str, Any]] = ()
        # the index of a value names it in the state dict. Ranks need not agree on it, because a
        # checkpoint goes by the keys of the pieces
        self._values = [
            value for storage in storages for value in self._values_of(storage, model_state)
        ]
        # a load that :meth:`adapt` does not match asks for what this run would save; for counts of
        # single parameters, and main weights of a float32 model, only where it finds some
        self._chosen = {
            index: value
            for index, value in enumerate(self._values)
            if counts is not None or not (value.is_count or value.is_of_model)
        }
        self._fresh: set[str] = set()  # parameters whose state starts fresh
        self.param_state: dict[str, Any] = {}

    def unstack_partial(self) -> None:
        """Unstack state that only some layers or experts of a stack have; collective."""
        written: dict[str, int] = {}
        whole: dict[str, int] = {}
        stacked = {index: value for index, value in self._chosen.items() if value.stacked}
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

    def kinds(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return the kinds of state of this rank's parameters, with their optimizer."""
        return sorted(
            {
                (str(where.reader.name), tuple(sorted(kinds)))
                for where, values in self._by_parameter()
                if (kinds := state_kinds(value.kind for value in values.values()))
            }
        )

    def adapt(self, catalogue: Catalogue, own: Kinds) -> LoadReport:
        """Request what the checkpoint has and what continues; see Note [Load rule].

        Call it before loading, because ``dist_checkpointing.load`` fails if a key is missing.

        Args:
            catalogue: What the checkpoint has.
            own: Kinds of state of all optimizers, of all ranks.

        Raises:
            CheckpointError: If the checkpoint has buckets of another layout, or an order of rows
                that only an earlier version reads.
        """
        if self.is_rematerialized and not all(map(_has_rows_of_model, catalogue.groups)):
            rule = "of rematerialized weights is in the order of rows of an earlier version"
            hint = "Load the model alone (--no-load-optim)"
            raise CheckpointError("checkpoint", "optimizer state", rule, hint)
        report = LoadReport()
        self.groups, self.common = catalogue.groups, catalogue.bucket_common
        boxes: Boxes = {}
        if catalogue.in_buckets:
            boxes = boxes_in_buckets(catalogue, *self._model, self._model_ranks())
        self._chosen = {}
        for where, values in self._by_parameter():
            self._chosen |= _sources_of(where, values, catalogue, boxes, own, report)
        self._fresh = report.fresh
        self._update_param_state()
        return report

    def _by_parameter(self) -> Iterator[tuple[ParameterLocation, dict[int, StateValue]]]:
        """Yield the values of each parameter by their index."""
        by_parameter: dict[str, dict[int, StateValue]] = {}
        for index, value in enumerate(self._values):
            by_parameter.setdefault(value.where.space.name, {})[index] = value
        for values in by_parameter.values():
            yield next(iter(values.values())).where, values

    def check(self, loaded: Mapping[str, Any]) -> None:
        """Raise a ConfigurationError if requested state is not in the loaded ``param_state``."""
        report = LoadReport()
        present = self._complete_values(loaded)
        for index in self._chosen.keys() - present.keys():
            value = self._values[index]
            if value.kind not in MAIN_KINDS:
                report.lack(value.where.space.name, f"no {value.kind}")
        report.refuse("checkpoint", has_stepped=False)

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
    def write_loaded(self, loaded: Mapping[str, Any]) -> None:
        """Write the loaded ``param_state`` into the optimizers' state, after :meth:`check`.

        Step counts of single parameters in the checkpoint override the common one, and state that
        starts fresh counts from 0.
        """
        present = self._complete_values(loaded)
        for index, value in enumerate(self._values):
            if value.is_count:
                continue
            if index in present:
                self._chosen[index].write_loaded(present[index])
            elif value.kind in MAIN_KINDS:
                # the checkpoint has no main weights, so the loaded model's weights are used
                value.take_from_model()
            elif value.where.state is not None and value.where.space.name in self._fresh:
                set_step(value.where.state, 0)
        # last, because these replace the common count, which ``continue_common`` has set
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

    def _model_ranks(self) -> dict[bool, int]:
        """Return the number of this model-parallel rank, without and with expert parallelism."""
        chunks, _ = self._model
        groups = ProcessGroupCollection.setup_process_groups_for_optimizer(
            None, list(chunks), use_gloo_process_groups=False
        )
        names = ("mp_group", "expt_tp_pp_with_egtp_remat_group")
        return {bool(number): get_pg_rank(groups[name]) for number, name in enumerate(names)}

    def _values_of(
        self, storage: StoredWeights, model_state: Mapping[str, Any]
    ) -> Iterator[StateValue]:
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

        @functools.cache
        def matrices_of(rule: UpdateRule, number: int) -> Sequence[MatrixSource]:
            """Return a parameter's logical matrices, if it has several."""
            shard = rule.shards[number]
            if shard.slab or len(shard.layouts) < 2:
                return ()
            return tuple(spaces[shard.param].matrices(shard.param, shard.split))

        for update_rule, number, group, item in stored:
            tensors = saved_state.sharded_like_weights(storage, update_rule, number)
            if self._counts is None and item.main is item.param:
                # of a run in 16 bits, whose checkpoint has the model's weights rounded
                tensors |= {storage.main_kind: local_of(item.main).detach()}
            space = spaces[item.param]
            where = ParameterLocation(
                space,
                storage.replica_of(item.param, space.sharded.replica_id),
                Writer.of(group, update_rule.name),
                update_rule.optional_state,
                states[update_rule, number],
                item,
                functools.partial(matrices_of, update_rule, number),
            )
            for kind, tensor in tensors.items():
                yield saved_state.sharded_value(kind, tensor, where)
            yield from self._count(update_rule, where, (0, 1), writes=where.holds_first)
        # several values share one state with one count, which is requested once
        counted = {id(state) for state in states.values()}
        for update_rule, param, its in unsharded:
            state = states.get((update_rule, its.shard))
            if update_rule.counts_matrices:
                # a count for each matrix is beside the value
                state = its.container
            # a counter of the whole group is a value like others, and no state has it
            if its.path[0] == OF_GROUPS:
                state = None
            replica = storage.replica_of_matrix(param, spaces[param].sharded.replica_id)
            count = max(1, len(update_rule.shards[its.shard].layouts))
            group = groups_of[update_rule][update_rule.group_of[its.shard]]
            reader = Writer.of(group, update_rule.name)
            where = ParameterLocation(
                spaces[param], replica, reader, update_rule.optional_state, state
            )
            if its.per_element:
                where = replace(
                    where, matrices=functools.partial(matrices_of, update_rule, its.shard)
                )
            yield saved_state.unsharded_value(its, where, count)
            if id(state) not in counted:
                counted.add(id(state))
                matrix = its.matrix, count
                yield from self._count(update_rule, where, matrix, writes=its.writes)

    def _count(
        self,
        update_rule: UpdateRule,
        where: saved_state.ParameterLocation,
        matrix: tuple[int, int],
        *,
        writes: bool,
    ) -> Iterator[StateValue]:
        """Yield the step count of a matrix; for saving, only if it differs from the update rule's.

        A parameter's count is that of matrix 0 of 1.
        """
        steps = None if where.state is None else where.state.get(STEP)
        # also None if another rank, the owner, has the count
        if steps is not None and (self._counts is None or int(steps) != self._counts[update_rule]):
            key = matrix_state_key(STEP, where.space.name, matrix)
            replica = (*where.replica, int(not writes))
            count = ShardedObject(key, int(steps), (1,), (0,), replica_id=replica)
            yield StateValue(where, STEP, (count,))


def _sources_of(
    where: ParameterLocation,
    values: Mapping[int, StateValue],
    catalogue: Catalogue,
    boxes: Boxes,
    own: Kinds,
    report: LoadReport,
) -> dict[int, StateValue]:
    """Return where one parameter's values are read from, by their index."""
    name = where.space.name
    mains = {index: value for index, value in values.items() if value.kind in MAIN_KINDS}
    state = {
        index: source
        for index, value in values.items()
        if index not in mains and (source := value.found_in(catalogue, boxes))
    }

    def misfit(kind: str) -> str | None:
        lacking = (v for index, v in values.items() if v.kind == kind and index not in state)
        return next((value.misfit_in(catalogue) for value in lacking), None)

    kinds = state_kinds(value.kind for value in values.values())
    saved = _saved_state(catalogue, boxes, where.space, own)
    if not report.continues(name, where.reader, kinds - where.optional, misfit, saved):
        state = {}
    for index in state:
        for before, now in values[index].dtypes_in(catalogue):
            report.note(f"{values[index].kind} is converted from {before} to {now}", name)
    for index, value in mains.items():
        # storages call main weights differently (``base/names.py``)
        places = (
            value.apart_from_model().found_in(catalogue, boxes, kind)
            for kind in (value.kind, *sorted(MAIN_KINDS - {value.kind}))
        )
        if (main := next(filter(None, places), None)) is not None:
            state[index] = main
        elif not value.is_of_model:
            report.note("main weights are copied from the model's weights", name)
    return state


def _saved_state(
    catalogue: Catalogue, boxes: Boxes, space: ParameterSpace, own: Kinds
) -> SavedState:
    """Return what a checkpoint has of a parameter."""
    # a parameter that is saved under several keys has a kind of state only if all of them have it
    state = catalogue.state
    stacks = (
        {*state.get(stack, ()), *state.get(unstacked_key(stack, space.stack_index), ())}
        for stack in space.keys
    )
    # state of matrices is under the parameter's own name only
    kinds = set.intersection(*stacks) | {*state.get(space.name, ())}
    if not state_kinds(kinds) and any(
        source.box.offset[: space.prepended] == space.stack_index
        for key in space.keys
        for source in boxes.get(key, ())
    ):
        kinds = {*catalogue.in_buckets}
    names = space.name, space.key
    return catalogue.state_of(names, state_kinds(kinds), own, is_matrix=space.is_matrix)


def _has_rows_of_model(group: Mapping[str, Any]) -> bool:
    # megatron-core's groups, which have no identity, always do
    return IN_ROWS_OF_MODEL in group or GROUP_ID not in group
