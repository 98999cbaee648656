"""This rank's state dict in torch's form; loads at the same layout."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_eopt.base.agreement import gather_unique, raise_together
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.checkpoint.optimizer_state import continue_common, prepare
from megatron_eopt.fsdp2.optimizer import DTensorOptimizer
from megatron_eopt.megatron_core.stored_weights import StoredWeights
from megatron_eopt.optimizers.update_rule import set_step
from megatron_eopt.routing.plain_names import match_names
from megatron_eopt.state.groups import PARAM_NAMES, children_of, inner_of
from megatron_eopt.state.rule import identity_of, log_lines
from megatron_eopt.state.state_dicts import SavedStateDict, misfit_of, named, write_state
from megatron_eopt.storage.local_tensors import local_of

MAINS_KEY = "fp32_from_fp16_params"
"""Key of the main weights in the state of megatron-core's wrapper: for each group, a list."""

MAIN_NAMES = "fp32_from_fp16_param_names"
"""Key of the names of their parameters, which are not all of the group if some are float32."""

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
    for group in inner["param_groups"]:
        if group.get("optimizer") == main_optimizer:
            group.pop("optimizer", None)
    if MAINS_KEY in result:
        name_of = _names_of(storage, names)
        result[MAIN_NAMES] = [[name_of[item] for item in group] for group in result[MAINS_KEY]]
        # aliases without attributes, which torch.load with weights_only=True could not read
        result[MAINS_KEY] = [[item.detach() for item in group] for group in result[MAINS_KEY]]
    return result


def load(storages: Sequence[StoredWeights], state: Any, names: Names) -> None:
    """Load what :func:`save` returned for each optimizer of a chain; collective.

    Groups keep this run's schedule.

    Raises:
        ConfigurationError: On all ranks and before any change, if groups without names differ, or
            state is missing or does not fit.
    """
    for storage in storages:
        if isinstance(storage.optimizer, DTensorOptimizer):
            storage.optimizer.allocate_for_load()
        elif not storage.is_stub_optimizer:
            prepare([storage], is_loading=True)
    saved = raise_together(lambda: _saved(storages, state, names))
    # another member of the chain, or another rank, may have those that the state dict has
    had = (
        True
        for item in saved
        for name in _names_of(item.storage, names).values()
        if name in item.saved.state
    )
    found = bool(gather_unique(had))
    # two phases: all ranks check all optimizers, then write, so that an error changes nothing
    for write in raise_together(lambda: [_load(item, names, found) for item in saved]):
        raise_together(write)


def refuse_rank_files(argument: str, value: str) -> ConfigurationError:
    """Return the error where one file for each rank would have to hold sharded state."""
    rule = "cannot hold optimizer state that the distributed optimizer shards"
    hint = (
        "Use --ckpt-format torch_dist (sharded_state_dict). To go on from an old checkpoint of "
        "format torch, convert it once with what wrote it, version 0.3.0 or megatron-core "
        "(--ckpt-convert-format torch_dist), or pass --no-load-optim"
    )
    return ConfigurationError(argument, value, rule, hint)


class _Saved(NamedTuple):
    """What a state dict has for one optimizer of a chain."""

    storage: StoredWeights
    part: Any  # of the state dict, with counts and loss scale
    saved: SavedStateDict
    mains: Mapping[str, Tensor]  # main weights by name


def _saved(storages: Sequence[StoredWeights], state: Any, names: Names) -> list[_Saved]:
    """Return what a state dict has for each optimizer."""
    parts = children_of(state) or [{} for _ in storages]
    present = [storage for storage in storages if not storage.is_stub_optimizer]
    has_names = all(PARAM_NAMES in inner_of(part) for part in parts)
    if not has_names and len(parts) != len(storages):
        raise ConfigurationError(
            "state_dict",
            f"the state of {len(parts)} optimizers",
            f"names no parameters, and does not match this rank, which has {len(storages)}",
            "Resume with the optimizers of the run that wrote it, or from a torch_dist checkpoint",
        )
    if has_names:
        # a parameter may have had another optimizer of the chain
        everything = [name for storage in present for name in _names_of(storage, names).values()]
        each = [SavedStateDict.of(inner_of(part), (), (), everything) for part in parts]
        joined, *others = each
        for other in others:
            joined |= other
        mains: dict[str, Tensor] = {}
        for part, its in zip(parts, each, strict=True):
            mains |= _mains(part, its, present, names)
        return [_Saved(storage, state, joined, mains) for storage in present]
    result = []
    for storage, part in zip(storages, parts, strict=True):
        if not storage.is_stub_optimizer:
            groups = storage.optimizer.param_groups
            its = SavedStateDict.of(inner_of(part), groups, _names_by_group(storage, names))
            result.append(_Saved(storage, part, its, _mains(part, its, [storage], names)))
    return result


def _names_of(storage: StoredWeights, names: Names) -> dict[Tensor, str]:
    """Return the names of the parameters by the tensors that are stepped."""
    # the model's parameters are not the shards that Megatron-FSDP has made of them
    return {shard.main: names.get(shard.param, shard.name) for shard in storage.shards}


def _names_by_group(storage: StoredWeights, names: Names) -> list[list[str]]:
    """Return the names of each group's parameters."""
    name_of = _names_of(storage, names)
    return [[name_of[main] for main in g["params"]] for g in storage.optimizer.param_groups]


def _mains(
    part: Mapping[str, Any], saved: SavedStateDict, storages: Sequence[StoredWeights], names: Names
) -> dict[str, Tensor]:
    """Return the main weights that one optimizer has saved, by the name of their parameter.

    megatron-core's own files name none. Of each group, the 16-bit parameters have main weights.

    Raises:
        ConfigurationError: If it has another number of them.
    """
    name_of: dict[Tensor, str] = {}
    for storage in storages:
        name_of |= _names_of(storage, names)
    shards = [shard for storage in storages for shard in storage.shards]
    halves = {name_of[shard.main] for shard in shards if shard.main is not shard.param}
    found: dict[str, Tensor] = {}
    given = part.get(MAIN_NAMES, [None] * len(saved.groups))
    for group, own, values in zip(saved.groups, given, part.get(MAINS_KEY, ()), strict=False):
        of_group = list(group[PARAM_NAMES])
        if own is not None:
            here = match_names(name_of.values(), own)
            back = {theirs: name for name, theirs in here.items()}
            of_group = [back.get(name, name) for name in own]
        elif len(of_group) != len(values):
            of_group = [name for name in of_group if name in halves]
        if len(of_group) != len(values):
            rule = f"does not name them, and {len(of_group)} parameters of the group have them here"
            hint = "Resume with the dtypes of that run, or from a torch_dist checkpoint"
            found_here = f"{len(values)} main weights of a group ({MAINS_KEY})"
            raise ConfigurationError("state_dict", found_here, rule, hint)
        found |= dict(zip(of_group, values, strict=True))
    return found


def _load(item: _Saved, names: Names, found: bool) -> _Write:
    """Check one optimizer's state, and return the function that loads it.

    ``found`` says whether the state dicts of all ranks have any of the parameters.
    """
    storage, saved = item.storage, item.saved
    optimizer = storage.optimizer
    groups, of_groups = optimizer.param_groups, _names_by_group(storage, names)
    if isinstance(optimizer, DTensorOptimizer):
        _, loads = optimizer.checked(item.part, saved, found)
    else:
        kinds = {p: frozenset(optimizer.state[p]) for group in groups for p in group["params"]}

        def misfit(param: Tensor, key: str, value: Any) -> str | None:
            return misfit_of(value, optimizer.state[param].get(key), key)

        stepped = storage.steps > 0
        rules, own = storage.update_rules, optimizer.state
        loads = saved.loads(groups, of_groups, rules, kinds, own, misfit, has_stepped=stepped)
    mains, name_of = [], _names_of(storage, names)
    for shard in storage.shards:
        name = name_of[shard.main]
        # without main weights in the checkpoint, the model's weights, which were loaded before
        value = item.mains.get(name, shard.param)
        if local_of(value).shape != local_of(shard.main).shape:
            rule = f"must have shape {tuple(local_of(shard.main).shape)}, as on this rank"
            hint = "Resume with the model and parallel layout of the run that wrote it"
            has = f"main weights ({MAINS_KEY}) of shape {tuple(local_of(value).shape)}"
            raise ConfigurationError(f"state_dict: {name}", has, rule, hint)
        if value is not shard.main:
            mains.append((shard.main, value))
    copied = [name_of[it.main] for it in storage.shards if it.main is not it.param]
    text = "main weights are copied from the model's weights"
    log_lines((text, name) for name in copied if name not in item.mains)
    members = {identity_of(g): its for g, its in zip(groups, of_groups, strict=True)}

    @torch.no_grad()
    def write() -> None:
        # before the state, whose own counts replace the common one
        continue_common([storage], item.part, members, saved.groups)
        if isinstance(optimizer, DTensorOptimizer):
            optimizer.load_checked(loads)
        else:
            for param, values in loads.items():
                if values is None:
                    set_step(optimizer.state[param], 0)
                write_state(optimizer.state[param], values or {}, _copy)
        for target, value in mains:
            local_of(target).copy_(local_of(value))

    return write


def _copy(mine: Tensor, value: Any) -> None:
    mine.copy_(torch.as_tensor(value).reshape(mine.shape))
