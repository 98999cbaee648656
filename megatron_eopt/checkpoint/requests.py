"""What a chain of optimizers asks of ``dist_checkpointing`` for the state of its parameters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import MOMENT2, STEP
from megatron_eopt.checkpoint.buckets import BucketSpace
from megatron_eopt.checkpoint.keys import saved_keys
from megatron_eopt.checkpoint.migration import Index, Policy, Reading, missing_state
from megatron_eopt.checkpoint.parameter_space import parameter_spaces
from megatron_eopt.checkpoint.saved_state import (
    MAINS,
    Owner,
    Shapes,
    Source,
    Value,
    Whereabouts,
    count_value,
    in_chain,
    kept_value,
    stored_values,
)
from megatron_eopt.optimizers.driver import OF_GROUPS, Driver, Kept
from megatron_eopt.optimizers.member import Member
from megatron_eopt.stores.dtensors import local_of
from megatron_eopt.stores.interface import Storage, Stored
from megatron_eopt.stores.sharded import FragmentsOptimizer


@dataclass(frozen=True)
class Form:
    """How a checkpoint names state.

    Attributes:
        main: Name of the main optimizer; see :func:`common_state`.
        by_bucket: Whether buckets are to be expected, until a checkpoint turns out to be another.
        by_place: Whether keys of several optimizers start with their places in the chain.
        fresh: Kinds of state that may be missing.
    """

    main: str | None = None
    by_bucket: bool = False
    by_place: bool = False
    fresh: frozenset[str] = frozenset()


class StateRequests:
    """The part of a sharded state dict that holds the parameters' state.

    Args:
        members: The optimizers of a chain.
        model_state: The model's ``sharded_state_dict``, with its parameters themselves as data.
        form: How it names state.
        counts: On saving the steps that each driver's states count; None on loading.

    Attributes:
        param_state: What goes into the sharded state dict; :meth:`adapt` changes it in place.

    Raises:
        ConfigurationError: If a parameter is not in the model's state.
    """

    def __init__(
        self,
        members: Sequence[Member],
        model_state: Mapping[str, Any],
        form: Form,
        counts: Mapping[Driver, int] | None = None,
    ) -> None:
        self._members = list(members)
        self._counts = counts
        self._may_lack = form.fresh
        self._buckets = {
            number: BucketSpace(member.storage, number)
            for number, member in enumerate(members)
            if isinstance(member.storage, FragmentsOptimizer)
            and not member.storage.is_stub_optimizer
        }
        self._held: list[tuple[Storage, Stored, dict[str, Tensor]]] = []
        self._values = [
            in_chain(value, number, first=form.by_place) if len(members) > 1 else value
            for number, member in enumerate(members)
            for value in self._values_of(member, model_state, self._buckets.get(number))
        ]
        in_bucket = (_in_bucket(value, form) if form.by_bucket else None for value in self._values)
        self._chosen = {
            place: source or value.sources[0]
            for place, (value, source) in enumerate(zip(self._values, in_bucket, strict=True))
            if not (value.is_count and counts is None)
        }
        self.param_state: dict[str, Any] = {}
        self._ask()
        self._own_keys: set[str] = set()
        for value in self._values:
            for source in value.sources:
                self._own_keys |= source.keys if source.bucket is None else set()

    def own_keys(self) -> set[str]:
        """Return the keys, in every spelling, of all state that there is."""
        return self._own_keys

    def keys(self) -> set[str]:
        """Return the checkpoint's keys that are asked for now."""
        return saved_keys(self.param_state)

    def adapt(self, shapes: Shapes, policy: Policy) -> list[str]:
        """Ask only for what a checkpoint has, as far as the difference is meant.

        State of another optimizer is left alone, and this one's starts fresh. Call it before
        loading; without it a key that is missing makes ``dist_checkpointing.load`` fail.

        Args:
            shapes: Keys and global shapes of the checkpoint's tensors; None for objects.
            policy: What may differ.

        Returns:
            What starts fresh or is taken from elsewhere, a line each.

        Raises:
            ConfigurationError: If state is missing, with the parameters and what they lack.
        """
        if not self._values:
            return []
        index, reading = Index(shapes), Reading(policy)
        in_buckets = self._kinds_in_buckets(shapes)
        if not index and not in_buckets:
            raise ConfigurationError(
                "checkpoint",
                "no optimizer state of this rank's parameters",
                "must hold optimizer state by parameter, or by bucket (dp_reshardable) of the same "
                "tensor and pipeline parallelism and the same buckets",
                "Load it at the layout that wrote it and save again, write it with "
                "--dist-ckpt-optim-fully-reshardable, or load no optimizer state (--no-load-optim)",
            )
        for owner, values in self._by_owner():
            there = index.kinds(owner.keys)
            if owner.stored is not None and not index:
                there = in_buckets.get(owner.stored.param, set())
            elif not index:
                there = {"another optimizer's"}
            reading.choose(owner, values, shapes, there)
        reading.check(other_buckets=index.has_buckets)
        self._chosen = reading.chosen
        self._ask()
        return reading.lines()

    @torch.no_grad()
    def take(self, loaded: Mapping[str, Any]) -> list[tuple[dict[str, Any], int]]:
        """Write what was loaded to where it belongs.

        Args:
            loaded: ``param_state`` with values in place of requests.

        Returns:
            The states that count other steps than all have done, and these steps.
        """
        found = loaded.get("values", {})
        lacking = [
            place
            for place, source in self._chosen.items()
            if len(found.get(str(place), {})) != len(source.pieces)
        ]
        self._refuse([self._values[place] for place in lacking])
        for place in lacking:
            del self._chosen[place]
        counts = []
        for place, source in self._chosen.items():
            pieces = found.get(str(place), {})
            values = [pieces[str(number)] for number in range(len(source.pieces))]
            value = self._values[place]
            if value.is_count:
                counts.append((value.owner.state or {}, int(values[0])))
            else:
                value.take(values, source)
        for place, value in enumerate(self._values):
            if value.kind in MAINS and place not in self._chosen:
                # the checkpoint has none: it is what the model was loaded with
                item = value.owner.stored
                assert item is not None
                model = local_of(item.param).detach().reshape(-1)[item.start : item.stop]
                value.flat.copy_(model)  # type: ignore[union-attr]
        for storage, item, tensors in self._held:
            storage.put_tensors(item, tensors)
        return [(state, 0) for state in self._fresh()] + counts

    def _refuse(self, lacking: Sequence[Value]) -> None:
        missing = [
            f"{value.owner.name}: {value.kind}"
            for value in lacking
            if value.kind not in self._may_lack | MAINS
        ]
        if missing:
            raise missing_state(missing)

    def _fresh(self) -> list[dict[str, Any]]:
        """Return the states of which nothing was loaded, or not the statistics that they count."""
        states: dict[int, tuple[dict[str, Any], list[bool]]] = {}
        lacking = set()
        for place, value in enumerate(self._values):
            if value.owner.state is not None and value.kind not in MAINS and not value.is_count:
                key = id(value.owner.state)
                states.setdefault(key, (value.owner.state, []))[1].append(place in self._chosen)
                if value.kind == MOMENT2 and place not in self._chosen:
                    lacking.add(key)
        return [state for key, (state, took) in states.items() if key in lacking or not any(took)]

    def _ask(self) -> None:
        self.param_state.clear()
        self.param_state["values"] = {
            str(place): {str(number): piece for number, piece in enumerate(source.pieces)}
            for place, source in self._chosen.items()
            if source.pieces
        }
        prefixes = {source.bucket for source in self._chosen.values()} - {None}
        buckets = {
            str(number): space.common(prefix)
            for number, space in self._buckets.items()
            for prefix in space.prefixes
            if prefix in prefixes
        }
        if buckets:
            self.param_state["buckets"] = buckets

    def _kinds_in_buckets(self, shapes: Shapes) -> dict[Tensor, set[str]]:
        kinds: dict[Tensor, set[str]] = {}
        for space in self._buckets.values():
            prefix = space.prefix(shapes)
            if prefix is not None:
                kinds.update(space.kinds(shapes, prefix))
        return kinds

    def _by_owner(self) -> list[tuple[Owner, dict[int, Value]]]:
        owners: dict[str, tuple[Owner, dict[int, Value]]] = {}
        for place, value in enumerate(self._values):
            owners.setdefault(value.owner.name, (value.owner, {}))[1][place] = value
        return list(owners.values())

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
        kept = [found for driver in member.drivers for found in _kept(member, driver)]
        params = dict.fromkeys([item.param for item in stored] + [param for _, param, _ in kept])
        spaces = parameter_spaces(model_state, params)
        for item in stored:
            driver, number = stepped[id(item.main)]
            tensors = {
                kind: value
                for kind, value in storage.tensors_of(item).items()
                if kind in MAINS or (kind != STEP and driver.is_cut_like_weights(kind, value))
            }
            self._held.append((storage, item, tensors))
            space = spaces[item.param]
            where = Whereabouts(
                space,
                storage.replica_of(space.sharded.replica_id),
                states[driver, number],
                driver.shards[number] if driver.shards else None,
                buckets,
            )
            yield from stored_values(item, tensors, where)
            yield from self._count(driver, where, "0", apart=not where.holds_first(item))
        counted = {id(state) for state in states.values()}
        for driver, param, value in kept:
            space = spaces[param]
            state = value.container
            if state is None:
                state = states.get((driver, value.shard))
            where = Whereabouts(
                space,
                storage.replica_of_matrix(space.sharded.replica_id),
                None if value.path[0] == OF_GROUPS else state,
                driver.shards[value.shard] if driver.shards else None,
            )
            yield kept_value(value, where)
            if id(where.state) not in counted:
                counted.add(id(where.state))
                yield from self._count(driver, where, str(value.matrix), apart=not value.writes)

    def _count(
        self, driver: Driver, where: Whereabouts, place: str, *, apart: bool
    ) -> Iterator[Value]:
        """Yield a count of steps, on saving if it is another than most of the driver's."""
        if where.state is None or STEP not in where.state:
            return
        if self._counts is None or int(where.state[STEP]) != self._counts[driver]:
            owner = Owner(where.space.name, where.space.keys, state=where.state)
            yield count_value(owner, place, (*where.replica, int(apart)))


def _in_bucket(value: Value, form: Form) -> Source | None:
    """Return a value's source in a bucket, whose key has a place in the chain or none."""
    found = [source for source in value.sources if source.bucket is not None]
    with_place = [source for source in found if str(source.bucket).startswith("chained_")]
    without = [source for source in found if source not in with_place]
    return next(iter([*with_place, *without] if form.by_place else [*without, *with_place]), None)


def _kept(member: Member, driver: Driver) -> list[tuple[Driver, Tensor, Kept]]:
    params = member.params[list(member.drivers).index(driver)]
    with member.scene(driver) as (groups, state):
        return [(driver, params[item.shard], item) for item in driver.kept(groups, state)]
