"""What a chain of optimizers asks of ``dist_checkpointing`` for the state of its parameters."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import is_main_replica
from torch import Tensor

from megatron_eopt.base.agreement import everyones, totals
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import MOMENT2, STEP
from megatron_eopt.checkpoint.buckets import BucketSpace, bucket_spaces, source_in_bucket
from megatron_eopt.checkpoint.by_parameter import count_value, kept_value, stored_values
from megatron_eopt.checkpoint.keys import CHAINED, key_apart, saved_keys
from megatron_eopt.checkpoint.migration import (
    Policy,
    Reading,
    kinds_by_parameter,
    matrices_by_place,
    missing_state,
)
from megatron_eopt.checkpoint.parameter_space import parameter_spaces
from megatron_eopt.checkpoint.saved_state import (
    MAINS,
    Shapes,
    Value,
    Whereabouts,
    cut_like_weights,
    kept_of,
)
from megatron_eopt.optimizers.driver import OF_GROUPS, Driver
from megatron_eopt.optimizers.member import Member

type Lacking = tuple[dict[str, Any], Collection[str]]
"""A state, and the kinds of it that a checkpoint does not have."""


@dataclass(frozen=True)
class Form:
    """How a checkpoint names state.

    Attributes:
        main: Name of the main optimizer; see :func:`common_state`.
        by_bucket: Whether buckets are to be expected, until a checkpoint turns out to be another.
        by_place: Whether keys of several optimizers start with their places in the chain.
        policy: What may differ, besides what the caller of a load says.
    """

    main: str | None = None
    by_bucket: bool = False
    by_place: bool = False
    policy: Policy = field(default_factory=Policy)


class StateRequests:
    """The part of a sharded state dict that holds the parameters' state: ``param_state``.

    The model's ``sharded_state_dict`` must hold the parameters themselves as data. On saving,
    ``counts`` are the steps that each driver's states count; None on loading.

    Raises:
        ConfigurationError: If a parameter is not in the model's state.
    """

    def __init__(
        self,
        members: Sequence[Member],
        model_state: Mapping[str, Any],
        form: Form,
        counts: Mapping[Driver, int] | None,
    ) -> None:
        self._counts = counts
        self.policy = form.policy
        self._may_lack = form.policy.fresh | MAINS
        self._buckets = bucket_spaces(members)
        self._values = [
            value.in_chain(f"chained_{number}.") if form.by_place and len(members) > 1 else value
            for number, member in enumerate(members)
            for value in self._values_of(member, model_state, self._buckets.get(number))
        ]
        self._chosen = {
            place: source_in_bucket(value, by_place=form.by_place) if form.by_bucket else value.own
            for place, value in enumerate(self._values)
            if not (value.is_count and counts is None)
        }
        self.param_state: dict[str, Any] = {}
        self._ask()

    def separate(self) -> None:
        """Write, or read, apart what not all layers or experts of a stack have; collective."""
        written: dict[str, int] = {}
        whole: dict[str, int] = {}
        for piece in (
            p for source in self._chosen.values() if source.stacked for p in source.pieces
        ):
            size = math.prod(piece.local_shape) if is_main_replica(piece.replica_id) else 0
            written[piece.key] = written.get(piece.key, 0) + size
            whole[piece.key] = math.prod(piece.global_shape)
        keys = everyones(sorted(written))
        sizes = zip(keys, totals([written.get(key, 0) for key in keys]), strict=True)
        parts = {key for key, size in sizes if size < whole.get(key, 0)}
        for place, source in self._chosen.items():
            if source.stacked and any(piece.key in parts for piece in source.pieces):
                self._chosen[place] = source.apart()
        self._ask()

    def own_keys(self) -> set[str]:
        """Return the keys by parameter, and those of buckets, in every spelling, of all state."""
        sources = [source for value in self._values for source in value.sources]
        keys = saved_keys([list(source.pieces) for source in sources if source.bucket is None])
        return keys.union(*(space.keys() for space in self._buckets.values()))

    def keys(self) -> set[str]:
        """Return the checkpoint's keys that are asked for now."""
        return saved_keys(self.param_state)

    def adapt(self, shapes: Shapes, policy: Policy) -> list[str]:
        """Ask only for what a checkpoint has, as far as the difference is meant.

        State of another optimizer is left alone, and this one's starts fresh. Call it before
        loading; without it a key that is missing makes ``dist_checkpointing.load`` fail.

        Returns:
            What starts fresh or is taken from elsewhere, a line each.

        Raises:
            ConfigurationError: If state is missing, with the parameters and what they lack.
        """
        if not self._values:
            return []
        kinds, has_buckets = kinds_by_parameter(shapes)
        reading = Reading(policy, matrices_by_place(shapes))
        in_buckets: dict[Tensor, set[str]] = {}
        for buckets in self._buckets.values():
            in_buckets |= buckets.kinds(shapes)
        if not kinds and not in_buckets:
            raise ConfigurationError(
                "checkpoint",
                "no optimizer state of this rank's parameters",
                "must hold optimizer state by parameter, or by bucket (dp_reshardable) of the same "
                "tensor and pipeline parallelism and the same buckets",
                "Load it at the layout that wrote it and save again, write it with "
                "--dist-ckpt-optim-fully-reshardable, or load no optimizer state (--no-load-optim)",
            )
        by_parameter: dict[str, dict[int, Value]] = {}
        # a parameter may have had another place in a chain
        prefixes = sorted({found[0] for key in shapes if (found := CHAINED.match(key))})
        for place, value in enumerate(self._values):
            anywhere = value.read_in_chain(prefixes)
            by_parameter.setdefault(value.where.space.name, {})[place] = anywhere
        for values in by_parameter.values():
            where = next(iter(values.values())).where
            if kinds:
                there = set.intersection(
                    *(
                        kinds.get(key, set()) | kinds.get(key_apart(key, where.space.places), set())
                        for key in where.space.keys
                    )
                )
            elif where.stored is not None:
                there = in_buckets.get(where.stored.param, set())
            else:
                there = {"another optimizer's"}
            reading.choose(values, shapes, there)
        all_match = bool(in_buckets) and all(in_buckets.values())
        reading.refuse(other_buckets=has_buckets and not all_match)
        self._chosen = reading.chosen
        self._ask()
        return reading.lines()

    def check(self, loaded: Mapping[str, Any]) -> None:
        """Raise a ConfigurationError if ``param_state`` was loaded without what must be there."""
        found = loaded.get("values", {})
        there = {
            place: source
            for place, source in self._chosen.items()
            if len(found.get(str(place), {})) == len(source.pieces)
        }
        absent = [self._values[place] for place in self._chosen.keys() - there.keys()]
        missing = [
            f"{value.where.space.name}: {value.kind}"
            for value in absent
            if value.kind not in self._may_lack
        ]
        if missing:
            raise missing_state(sorted(missing))
        self._chosen = there

    @torch.no_grad()
    def take(
        self, loaded: Mapping[str, Any]
    ) -> tuple[list[tuple[dict[str, Any], int]], list[Lacking]]:
        """Write what was loaded, after a :meth:`check`, to where it belongs.

        Returns:
            The states that count other steps than all have done, with these steps, and those of
            which something was not loaded, with its kinds.
        """
        found = loaded.get("values", {})
        counts = []
        for place, source in self._chosen.items():
            value, pieces = self._values[place], found.get(str(place), {})
            values = [pieces[str(number)] for number in range(len(source.pieces))]
            if value.is_count:
                counts.append((value.where.state or {}, int(values[0])))
            else:
                value.take(values, source)
        for place, value in enumerate(self._values):
            if value.kind in MAINS and place not in self._chosen:
                # the checkpoint has none: it is what the model was loaded with
                value.take_from_model()
        states: dict[int, tuple[dict[str, Any], set[str], set[str]]] = {}
        for place, value in enumerate(self._values):
            state = value.where.state
            if state is None or value.kind in MAINS or value.is_count:
                continue
            _, took, lacking = states.setdefault(id(state), (state, set(), set()))
            kind = value.kind if value.kept is None else value.kept.path[0]
            (took if place in self._chosen else lacking).add(kind)
        # nothing was loaded of these, or not the statistics that they count
        fresh = [(s, 0) for s, took, lacking in states.values() if not took or MOMENT2 in lacking]
        return fresh + counts, [(s, lacking) for s, _, lacking in states.values() if lacking]

    def _ask(self) -> None:
        self.param_state.clear()
        self.param_state["values"] = {
            str(place): {str(number): piece for number, piece in enumerate(source.pieces)}
            for place, source in self._chosen.items()
            if source.pieces
        }
        prefixes = {source.bucket for source in self._chosen.values()}
        buckets = {
            str(number): space.common(prefix)
            for number, space in self._buckets.items()
            for prefix in space.prefixes
            if prefix in prefixes
        }
        if buckets:
            self.param_state["buckets"] = buckets

    def _values_of(
        self, member: Member, model_state: Mapping[str, Any], buckets: BucketSpace | None
    ) -> Iterator[Value]:
        """Yield all values of state that one optimizer of the chain holds on this rank."""
        storage = member.storage
        stored = list(storage.stored())
        stepped = {id(main): (driver, number) for driver, number, main in member.stepped()}
        states = {
            (driver, number): storage.optimizer.state[main]
            for driver, number, main in member.stepped()
        }
        kept = list(kept_of(member))
        params = dict.fromkeys([item.param for item in stored] + [param for _, param, _ in kept])
        spaces = parameter_spaces(model_state, params)
        for item in stored:
            driver, number = stepped[id(item.main)]
            tensors = cut_like_weights(member, item, driver, number)
            space = spaces[item.param]
            replica = storage.replica_of(space.sharded.replica_id)
            shard = driver.shards[number] if driver.shards else None
            where = Whereabouts(space, replica, states[driver, number], shard, item)
            yield from stored_values(tensors, where, buckets)
            yield from self._count(driver, where, "0", writes=where.holds_first)
        counted = {id(state) for state in states.values()}
        for driver, param, its in kept:
            state = states.get((driver, its.shard))
            if driver.counts_matrices or state is None:
                state = its.container
            if its.path[0] == OF_GROUPS:
                state = None
            replica = storage.replica_of_matrix(spaces[param].sharded.replica_id)
            shard = driver.shards[its.shard] if driver.shards else None
            where = Whereabouts(spaces[param], replica, state, shard)
            yield kept_value(its, where)
            if id(state) not in counted:
                counted.add(id(state))
                # one of a parameter is written by who stores its beginning
                own = driver.counts_matrices
                place = str(its.matrix) if own else "0"
                yield from self._count(driver, where, place, writes=own and its.writes)

    def _count(
        self, driver: Driver, where: Whereabouts, place: str, *, writes: bool
    ) -> Iterator[Value]:
        """Yield a count of steps, on saving if it is another than most of the driver's."""
        # None stands for a count that an owner keeps
        if where.state is None or where.state.get(STEP) is None:
            return
        if self._counts is None or int(where.state[STEP]) != self._counts[driver]:
            yield count_value(where, place, writes=writes)
