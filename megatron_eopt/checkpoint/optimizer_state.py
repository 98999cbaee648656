"""The state of a chain of optimizers, as ``dist_checkpointing`` saves and loads it."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

from megatron_eopt.base.agreement import any_rank, gather_objects, gather_unique, raise_together
from megatron_eopt.base.names import STEP
from megatron_eopt.checkpoint.parameter_space import parameter_spaces
from megatron_eopt.checkpoint.requests import StateRequests
from megatron_eopt.megatron_core.stored_weights import StoredWeights
from megatron_eopt.optimizers.update_rule import ParamGroup, State, UpdateRule
from megatron_eopt.state.groups import (
    IN_ROWS_OF_MODEL,
    PARAM_NAMES,
    Groups,
    Members,
    children_of,
    continue_groups,
    inner_of,
    saved_groups,
    saved_steps,
    steps_of,
)
from megatron_eopt.state.rule import identity_of

REQUESTS = "requests"
"""Key of the :class:`StateRequests` in a sharded state dict for loading."""

PARAM_STATE = "param_state"
"""Key of the pieces to read or write."""


def requested(
    storages: Sequence[StoredWeights],
    model_state: Mapping[str, Any],
    *,
    is_loading: bool,
    main_optimizer: str | None = None,
    model_chunks: Sequence[Any] = (),
) -> dict[Any, Any]:
    """Return what ``dist_checkpointing`` saves or loads for a chain; collective.

    ``main_optimizer`` is its name in groups; for other arguments, see
    :class:`~megatron_eopt.checkpoint.requests.StateRequests`.
    """
    prepare(storages, is_loading=is_loading)
    # a load takes counts from the checkpoint, a save needs those of all ranks
    by_name = {} if is_loading else _counts_by_name(storages)
    numbered = [
        (number, rule) for number, storage in enumerate(storages) for rule in storage.update_rules
    ]
    counts = None if is_loading else {rule: by_name[n, rule.name] for n, rule in numbered}
    requests = raise_together(lambda: StateRequests(storages, model_state, counts, model_chunks))
    # needs the other ranks, so it follows the part in which a rank may raise
    requests.unstack_partial()
    # equal on all ranks: groups, step counts by update rule, and loss scale
    states: list[dict[Any, Any]] = []
    for number, storage in enumerate(storages):
        steps = [
            (counts or {}).get(item.rule, -1) for item in storage.assigned for _ in item.groups()
        ]
        if not storage.update_rules:
            # other pipeline stages have all parameters of these groups
            count = max((c for (index, _), c in by_name.items() if index == number), default=-1)
            steps = [count] * len(storage.optimizer.param_groups)
        states.append(storage.common_state(steps, main_optimizer))
    named = _params_of_groups(storages, model_state)
    if not is_loading:
        groups = [g for child in states for g in inner_of(child).get("param_groups", ())]
        _name_params(groups, named)
        # a stage may have none of these weights, and groups are the same on all ranks
        for group in groups if any_rank(requests.is_rematerialized) else ():
            group[IN_ROWS_OF_MODEL] = True
    result = states[0] if len(states) == 1 else dict(enumerate(states))
    result[PARAM_STATE] = requests.param_state
    if is_loading:
        for called, *names in named:
            requests.members.setdefault(called, set()).update(names)
        # it returns from ``dist_checkpointing.load`` in the loaded state dict, where ``load`` finds
        # it
        result[REQUESTS] = LocalNonpersistentObject(requests)
    return result


def _params_of_groups(
    storages: Sequence[StoredWeights], model_state: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    """Return what groups are called with keys and names of their parameters; collective."""
    called = iter(_called([g for storage in storages for g in storage.optimizer.param_groups]))
    entries = []
    for storage in storages:
        param_of = {shard.main: shard.param for shard in storage.shards}
        spaces = parameter_spaces(model_state, param_of.values())
        for group in storage.optimizer.param_groups:
            of_group = [spaces[param_of[main]] for main in group["params"]]
            name = next(called)
            entries += [(name, space.key, space.name) for space in of_group]
    return gather_unique(entries)


def _called(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the identity of each group, or its number if a caller's group has none."""
    return [identity_of(group) or str(number) for number, group in enumerate(groups)]


def _name_params(groups: Sequence[dict[str, Any]], entries: Sequence[tuple[str, str, str]]) -> None:
    """Write the names of all ranks' parameters into the groups to save.

    A stack whose layers or experts are all in one group has one name.
    """
    groups_of: dict[str, set[str]] = {}
    for called, key, _ in entries:
        groups_of.setdefault(key, set()).add(called)
    named: dict[str, dict[str, None]] = {}
    for called, key, name in sorted(entries):
        named.setdefault(called, {})[key if len(groups_of[key]) == 1 else name] = None
    for group, called in zip(groups, _called(groups), strict=True):
        group[PARAM_NAMES] = list(named.get(called, ()))


def prepare(storages: Sequence[StoredWeights], *, is_loading: bool) -> None:
    """Create all state that can be saved or loaded."""
    for update_rule, work in _groups_and_states(storages):
        (update_rule.allocate_for_load if is_loading else update_rule.init)(*work)


def pack_loaded(storages: Sequence[StoredWeights]) -> None:
    """Convert loaded state to the form in which it is kept between steps; collective."""
    for update_rule, work in _groups_and_states(storages):
        update_rule.pack(*work)


def _groups_and_states(
    storages: Sequence[StoredWeights],
) -> Iterator[tuple[UpdateRule, tuple[list[ParamGroup], State]]]:
    for storage in storages:
        for item in storage.assigned:
            with item.groups_and_state() as work:
                yield item.rule, work


def _counts_by_name(storages: Sequence[StoredWeights]) -> dict[tuple[int, str], int]:
    """Return the step count of each update rule's state, -1 if it has none; collective.

    Keys are a position in the chain and a rule's name, because a rank may lack an update rule.
    """
    local: dict[tuple[int, str], int] = {}
    for number, storage in enumerate(storages):
        for update_rule, work in _groups_and_states([storage]):
            steps = [int(state[STEP]) for state in update_rule.counting(*work)]
            key = number, update_rule.name
            # several update rules of a storage may have the same name
            local[key] = max([*steps, local.get(key, -1)])
    largest: dict[tuple[int, str], int] = {}
    for counts in gather_objects(local):
        largest |= {key: max(count, largest.get(key, -1)) for key, count in counts.items()}
    return largest


def check(state: Mapping[Any, Any]) -> None:
    """Raise a ConfigurationError if state that :func:`requested` returned was not loaded."""
    state[REQUESTS].check(state.get(PARAM_STATE, {}))


def load(storages: Sequence[StoredWeights], state: Mapping[Any, Any]) -> None:
    """Write what was loaded for :func:`requested` into the optimizers, after :func:`check`.

    Groups keep this run's schedule. Main weights that the checkpoint lacks are copied from the
    model, which must be loaded first.
    """
    requests = state[REQUESTS]
    continue_common(
        storages, [*children_of(state), *requests.common], requests.members, requests.groups
    )
    # after the common counts, which those of single parameters replace; missing if this rank has no
    # state
    requests.write_loaded(state.get(PARAM_STATE, {}))


def continue_common(
    storages: Sequence[StoredWeights],
    state: Any,
    members: Members = MappingProxyType({}),
    groups: Groups | None = None,
) -> None:
    """Load groups, step counts and loss scale, also from another chain of optimizers.

    Each step count becomes that of the matching groups in the checkpoint.

    Args:
        storages: The optimizers of the chain.
        state: What the checkpoint has for each of its optimizers.
        members: Names of the groups' parameters, if they are known.
        groups: The checkpoint's groups with their optimizers' names, if they are known.
    """
    saved = saved_groups(state) if groups is None else groups
    steps = saved_steps(state)
    scalers = [child["grad_scaler"] for child in children_of(state) if child.get("grad_scaler")]
    for storage in storages:
        storage.twins = continue_groups(storage.optimizer.param_groups, saved, members)
        storage.loaded_groups = saved
        storage.steps = steps
        if storage.grad_scaler and scalers:
            storage.grad_scaler.load_state_dict(scalers[0])
        for update_rule, (own, values) in _groups_and_states([storage]):
            update_rule.set_steps(own, values, steps_of(own, saved, steps, members))
