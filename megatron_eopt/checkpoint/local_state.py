"""This rank's state dict in torch's form; loads at the same layout."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_eopt.base.agreement import raise_together
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.nested_state import leaves
from megatron_eopt.checkpoint.continuation import Policy
from megatron_eopt.checkpoint.dtensor_optimizer import DTensorOptimizer
from megatron_eopt.checkpoint.optimizer_state import adopt_common, prepare
from megatron_eopt.checkpoint.saved_groups import (
    PARAM_NAMES,
    children_of,
    identity_of,
    inner_of,
    saved_groups,
)
from megatron_eopt.checkpoint.state_dicts import StateDictMatch, Target, named, targets_of
from megatron_eopt.optimizers.storage import Storage
from megatron_eopt.storage.local_tensors import local_of

MAINS = "fp32_from_fp16_params"
"""Key of the main weights in the state of megatron-core's wrapper for 16-bit parameters."""

type Names = Mapping[Tensor, str]
"""Names of the model's parameters."""

type _Write = Callable[[], None]
"""Loads one optimizer's state, which has been checked."""


def save(storage: Any, main_optimizer: str | None, names: Names) -> dict[str, Any]:
    """Return the state of one optimizer of a chain, of tensors and plain Python values only.

    For ZeRO-1 fragments it has groups, steps and loss scale only. As in megatron-core, groups do
    not name the main optimizer.
    """
    if storage.is_stub_optimizer:
        return {}
    # megatron-core keeps fragments out of the common file, and writes them by other methods
    is_whole = not isinstance(storage, DistributedOptimizer)
    if is_whole:
        prepare([storage], is_loading=False)
    result: dict[str, Any] = storage.state_dict()
    inner = inner_of(result)
    if is_whole:
        inner = named(inner, _names_by_group(storage, names))
        result = {**result, "optimizer": inner} if "optimizer" in result else inner
    elif storage.in_buffers:
        of_groups = _names_by_group(storage, names)
        for group, its in zip(inner["param_groups"], of_groups, strict=True):
            group[PARAM_NAMES] = its
    for group in inner["param_groups"]:
        if group.get("optimizer") == main_optimizer:
            group.pop("optimizer", None)
    if MAINS in result:
        # aliases without attributes, which torch.load with weights_only=True could not read
        result[MAINS] = [[item.detach() for item in group] for group in result[MAINS]]
    return result


def load(storages: Sequence[Storage], state: Any, policy: Policy, names: Names) -> None:
    """Load what :func:`save` returned for each optimizer of a chain; collective.

    Groups keep this run's schedule. State of the kinds that the policy names may be missing.

    Raises:
        ConfigurationError: On all ranks and before any change, if optimizers or groups differ, or
            state is missing or does not fit.
    """
    for storage in storages:
        if isinstance(storage.optimizer, DTensorOptimizer):
            storage.optimizer.allocate_for_load()
        elif not storage.is_stub_optimizer:
            prepare([storage], is_loading=True)
    # two phases: all ranks check all optimizers, then write, so that an error changes nothing
    for write in raise_together(lambda: _checked(storages, state, policy, names)):
        raise_together(write)


def check_groups(state: Any, *, is_enough: bool) -> None:
    """Check the ``state_dict()`` of a chain with ZeRO-1 fragments, which has groups only.

    Raises:
        ConfigurationError: If nothing else loads the rest (not ``is_enough``), or if it has state.
    """
    if not is_enough or any(inner_of(child).get("state") for child in children_of(state)):
        rule = "has no fragments of state and main weights, which every rank needs"
        hint = (
            "Load what sharded_state_dict(..., is_loading=True) returned, or use "
            "save_state_dict_to_file and load_state_dict_from_file"
        )
        raise ConfigurationError("state_dict", "groups, or whole parameters", rule, hint)


def load_groups(storages: Sequence[Storage], state: Any, names: Names) -> None:
    """Load what :func:`check_groups` has checked; collective."""
    # step counts can only be set once they exist
    prepare(storages, is_loading=True)
    members = {
        identity_of(group): its
        for storage in storages
        if not storage.is_stub_optimizer
        for group, its in zip(
            storage.optimizer.param_groups, _names_by_group(storage, names), strict=True
        )
    }
    adopt_common(storages, state, members)


def _checked(storages: Sequence[Storage], state: Any, policy: Policy, names: Names) -> list[_Write]:
    parts = children_of(state) or [{} for _ in storages]
    if all(PARAM_NAMES in inner_of(part) for part in parts):
        # a parameter may have had another optimizer of the chain
        parts = [_joined(parts)] * len(storages)
    if len(parts) != len(storages):
        raise ConfigurationError(
            "state_dict",
            f"the state of {len(parts)} optimizers",
            f"names no parameters, and does not match this rank, which has {len(storages)}",
            "Resume with the optimizers of the run that wrote it, or from a torch_dist checkpoint",
        )
    return [
        _load(storage, part, policy, names)
        for storage, part in zip(storages, parts, strict=True)
        if not storage.is_stub_optimizer
    ]


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of several optimizers as that of one."""
    state: dict[Any, Any] = {}
    names: dict[Any, str] = {}
    groups: list[dict[str, Any]] = []
    mains: list[Any] = []
    for place, part in enumerate(parts):
        inner, own = inner_of(part), saved_groups(part)
        state |= {(place, number): values for number, values in inner["state"].items()}
        names |= {(place, number): name for number, name in inner[PARAM_NAMES].items()}
        groups += [{**g, "params": [(place, number) for number in g["params"]]} for g in own]
        mains += [*part.get(MAINS, ()), *([] for _ in own)][: len(own)]
    inner = {"state": state, "param_groups": groups, PARAM_NAMES: names}
    scale = {key: part[key] for part in parts for key in ("grad_scaler",) if part.get(key)}
    return {"optimizer": inner, MAINS: mains, **scale}


def _names_by_group(storage: Storage, names: Names) -> list[list[str]]:
    """Return the names of each group's parameters, of all data-parallel ranks."""
    if storage.in_buffers:
        # a placeholder stands for the parameters of a matrix optimizer
        return [[names[p] for p in its if p in names] for its in storage.params_of_groups]
    name_of = {shard.main: names[shard.param] for shard in storage.shards}
    return [[name_of[main] for main in g["params"]] for g in storage.optimizer.param_groups]


def _load(storage: Storage, part: Mapping[str, Any], policy: Policy, names: Names) -> _Write:
    """Check one optimizer's state, and return the function that loads it."""
    optimizer = storage.optimizer
    if isinstance(optimizer, DTensorOptimizer):
        match, loaded = optimizer.checked(inner_of(part), policy)
        write_state: _Write = functools.partial(optimizer.take, loaded)
    else:
        write_state, match = _of_whole_parameters(storage, part, policy, names)
    mains = _mains(storage, part, match, names)

    @torch.no_grad()
    def write() -> None:
        # before the state, whose own counts replace the common one
        adopt_common([storage], part, match.members)
        write_state()
        for target, value in mains:
            local_of(target).copy_(local_of(value))

    return write


def _of_whole_parameters(
    storage: Storage, part: Mapping[str, Any], policy: Policy, names: Names
) -> tuple[_Write, StateDictMatch]:
    optimizer = storage.optimizer
    groups = optimizer.param_groups
    names_of = _names_by_group(storage, names)
    targets = targets_of(groups, names_of, storage.update_rules, optimizer.state)
    match = StateDictMatch(inner_of(part), groups, targets)

    def problem_with(target: Target, key: str, value: Any) -> str | None:
        return _misfit(value, optimizer.state[target.param].get(key), key)

    loaded = match.load(policy, problem_with, has_stepped=storage.steps > 0)

    def write() -> None:
        for param, its in loaded.items():
            its.write(optimizer.state[param], _copy)

    return write, match


def _mains(
    storage: Storage, part: Mapping[str, Any], match: StateDictMatch, names: Names
) -> list[tuple[Tensor, Tensor]]:
    """Return main weights with what is loaded into them: saved ones, or the model's weights."""
    saved = {
        number: value
        for group, values in zip(inner_of(part)["param_groups"], part.get(MAINS, ()), strict=False)
        for number, value in zip(group["params"], values, strict=False)
    }
    pairs = []
    for item in storage.shards:
        if item.main is item.param or not hasattr(storage, "fp32_from_float16_groups"):
            continue
        # without main weights in the checkpoint, the model's weights, which were loaded before
        value = saved.get(match.number_of(names[item.param]), item.param)
        if local_of(value).shape != local_of(item.main).shape:
            rule = f"must have shape {tuple(local_of(item.main).shape)}, as on this rank"
            hint = "Resume with the model and parallel layout of the run that wrote it"
            found = f"main weights ({MAINS}) of shape {tuple(local_of(value).shape)}"
            raise ConfigurationError(f"state_dict: {names[item.param]}", found, rule, hint)
        pairs.append((item.main, value))
    return pairs


def _copy(mine: Tensor, value: Any) -> Tensor:
    return mine.copy_(torch.as_tensor(value).reshape(mine.shape))


def _misfit(value: Any, own: Any, key: str) -> str | None:
    """Return why a saved value, which may be nested, cannot be loaded into ``own``; or None."""
    saved = dict(leaves(value, (key,)))
    for path, mine in leaves(own, (key,)):
        its = tuple(torch.as_tensor(saved.get(path, ())).shape)
        shape = tuple(torch.as_tensor(mine).shape)
        # sides of 1 may differ, as between counters of shape () and (1,)
        if [n for n in its if n != 1] != [n for n in shape if n != 1]:
            return f"of shape {its} must have shape {shape}"
    return None
