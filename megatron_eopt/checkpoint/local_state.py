"""This rank's state as torch has it, by number: for the same optimizers at the same layout."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import STEP
from megatron_eopt.checkpoint.groups import (
    adopt,
    children_of,
    match_all,
    optimizers_of,
    saved_groups,
    saved_scaler,
    saved_steps,
)
from megatron_eopt.checkpoint.migration import shortened
from megatron_eopt.optimizers.driver import leaves, put
from megatron_eopt.optimizers.member import Member
from megatron_eopt.optimizers.sharded import ShardedOptimizer
from megatron_eopt.stores.dtensors import local_of, shard_like

MAINS = "fp32_from_fp16_params"
"""Key of the main weights in the state of megatron-core's wrapper for 16-bit parameters."""


def save(member: Member, main: str | None) -> dict[str, Any]:
    """Return the state of one optimizer of a chain: tensors, numbers, lists and dictionaries alone.

    That of fragments has groups, steps and loss scale only.

    Args:
        member: The optimizer.
        main: Name of the main optimizer. megatron-core names only the other ones in groups, and
            matches groups by it.
    """
    storage: Any = member.storage
    if storage.is_stub_optimizer:
        return {}
    if hasattr(storage, "model_param_group_index_map"):
        own: dict[str, Any] = storage.state_dict()
        return own
    for driver in member.drivers:
        with member.scene(driver) as (groups, state):
            driver.init(groups, state)
    inner = storage.optimizer.state_dict()
    for group in inner["param_groups"]:
        if group.get("optimizer") == main:
            del group["optimizer"]
    mains = getattr(storage, "fp32_from_float16_groups", None)
    if mains is None:
        return inner  # type: ignore[no-any-return]
    result: dict[str, Any] = {"optimizer": inner}
    if storage.grad_scaler:
        result["grad_scaler"] = storage.grad_scaler.state_dict()
    # aliases without the attributes, which may be objects of our classes
    result[MAINS] = [[item.detach() for item in group] for group in mains]
    return result


@torch.no_grad()
def load(members: Sequence[Member], state: Any, fresh: Sequence[str]) -> None:
    """Load what :func:`save` returned for each optimizer of a chain, in place.

    Groups match by identity and keep the present run's schedule. Nothing has changed if it fails.

    Args:
        members: The optimizers.
        state: A state, a list of states, or a mapping from their numbers.
        fresh: Kinds of state that may be missing.

    Raises:
        ConfigurationError: If it has other optimizers or groups, or lacks state.
    """
    parts = children_of(state)
    saved = [optimizers_of(saved_groups(part)) for part in parts]
    present = [
        optimizers_of(() if m.storage.is_stub_optimizer else m.storage.optimizer.param_groups)
        for m in members
    ]
    same = len(saved) == len(present) and all(
        None in its or its == mine for its, mine in zip(saved, present, strict=True)
    )
    if not same:
        raise ConfigurationError(
            "state_dict",
            [sorted(map(str, names)) for names in saved],
            f"must hold the state of the optimizers {[sorted(map(str, n)) for n in present]}",
            "Resume with the optimizers and overrides of the run that wrote the checkpoint",
        )
    pairs = [
        (member, part)
        for member, part in zip(members, parts, strict=True)
        if not member.storage.is_stub_optimizer
    ]
    for loading in [_Loading(member, part, frozenset(fresh)) for member, part in pairs]:
        loading.take()


class _Loading:
    """One optimizer's state, matched with what it keeps, and then written there."""

    def __init__(self, member: Member, part: Mapping[str, Any], fresh: frozenset[str]) -> None:
        self._storage: Any = member.storage
        self._part = part
        for driver in member.drivers:
            with member.scene(driver) as (groups, state):
                driver.expect(groups, state)
        optimizer = self._storage.optimizer
        inner = part.get("optimizer", part)
        saved = inner.get("param_groups", ())
        self._twins = match_all(saved, optimizer.param_groups)
        self._groups = [
            (group, saved[twin])
            for group, twin in zip(optimizer.param_groups, self._twins, strict=True)
        ]
        states = inner.get("state", {})
        common = {STEP: states["common_step"]} if "common_step" in states else {}
        self._states = [
            (param, {**common, **states.get(number, {})})
            for present, its in self._groups
            for param, number in _numbered(present, its)
        ]
        missing = [
            f"parameter {number} of shape {tuple(param.shape)}: {kind}"
            for number, (param, values) in enumerate(self._states)
            for kind in sorted(optimizer.state[param].keys() - values.keys() - fresh)
        ]
        if missing:
            raise _missing(missing)
        if not isinstance(optimizer, ShardedOptimizer):
            for param, values in self._states:
                _check_shapes(param, optimizer.state[param], values)
        self._mains = list(self._pairs_of_mains())

    def take(self) -> None:
        """Write everything to where it belongs."""
        optimizer = self._storage.optimizer
        if isinstance(optimizer, ShardedOptimizer):
            self._take_dtensors(optimizer)
        else:
            for param, values in self._states:
                _take(optimizer.state[param], values)
        for target, value in self._mains:
            local_of(target).copy_(local_of(value))
        for group, its in self._groups:
            adopt(group, [its])
            if STEP in its:
                group[STEP] = its[STEP]
        self._storage.steps = saved_steps(self._part)
        scaler = saved_scaler(self._part)
        if self._storage.grad_scaler and scaler is not None:
            self._storage.grad_scaler.load_state_dict(scaler)

    def _take_dtensors(self, optimizer: ShardedOptimizer) -> None:
        """Hand over state of shards, and of whole matrices; collective."""
        numbers = iter(range(len(self._states)))
        groups = [
            {**group, "params": [next(numbers) for _ in group["params"]]}
            for group in optimizer.param_groups
        ]
        states = {
            number: {kind: _shard(param, value) for kind, value in values.items()}
            for number, (param, values) in enumerate(self._states)
        }
        optimizer.load_state_dict({"state": states, "param_groups": groups})

    def _pairs_of_mains(self) -> Iterator[tuple[Tensor, Tensor]]:
        present = getattr(self._storage, "fp32_from_float16_groups", ())
        saved = self._part.get(MAINS, ())
        for mains, twin in zip(present, self._twins, strict=False):
            its = saved[twin] if twin < len(saved) else ()
            if [local_of(a).shape for a in mains] != [local_of(b).shape for b in its]:
                raise _missing([f"{MAINS}: {len(its)} of {len(mains)} main weights of a group"])
            yield from zip(mains, its, strict=True)


def _numbered(present: Mapping[str, Any], its: Mapping[str, Any]) -> Iterator[tuple[Tensor, Any]]:
    numbers = its.get("params", ())
    if len(numbers) != len(present["params"]):
        raise ConfigurationError(
            "state_dict",
            f"{len(numbers)} parameters in group {present.get('group_id')}",
            f"this rank has {len(present['params'])} of them",
            "Resume with the same model in the same parallel layout, or from a torch_dist "
            "checkpoint",
        )
    return zip(present["params"], numbers, strict=True)


def _check_shapes(param: Tensor, kept: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    for kind in kept.keys() & values.keys():
        mine, its = dict(leaves(kept[kind])), dict(leaves(values[kind]))
        same = mine.keys() == its.keys() and all(
            torch.as_tensor(its[path]).numel() == torch.as_tensor(value).numel()
            for path, value in mine.items()
            if isinstance(value, Tensor | int | float)
        )
        if not same:
            raise ConfigurationError(
                "state_dict",
                f"{kind} of {_describe(values[kind])}",
                f"must be of {_describe(kept[kind])}, for a parameter of shape "
                f"{tuple(param.shape)}",
                "Resume with the settings and the tensor-parallel size of the run that wrote the "
                "checkpoint, or start this state anew with checkpoint_fresh_state",
            )


def _take(kept: dict[str, Any], values: Mapping[str, Any]) -> None:
    for kind in kept.keys() & values.keys():
        saved = dict(leaves(values[kind], (kind,)))
        for path, mine in list(leaves(kept[kind], (kind,))):
            if isinstance(mine, Tensor):
                mine.copy_(torch.as_tensor(saved[path]).reshape(mine.shape))
            else:
                put(kept, path, type(mine)(saved[path]))


def _shard(param: Tensor, value: Any) -> Any:
    """Return a loaded shard as the DTensor that it is a part of."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or not value.dim():
        return value
    return shard_like(param, value)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"pieces [{', '.join(map(_describe, value))}]"
    return type(value).__name__


def _missing(missing: list[str]) -> ConfigurationError:
    return ConfigurationError(
        "state_dict",
        f"without {shortened(missing)}",
        "must hold all state of this run's optimizers",
        "Load a checkpoint of the same optimizers, or name the states that shall start anew in "
        "checkpoint_fresh_state",
    )
