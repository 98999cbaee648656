"""This rank's state as torch has it, by number: for the same optimizers at the same layout."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import STEP
from megatron_eopt.checkpoint.groups import children_of, match_all, optimizers_of, saved_groups
from megatron_eopt.checkpoint.migration import MAY_BE_YOUNGER, missing_state
from megatron_eopt.checkpoint.optimizer_state import TakeT, adopt_common, prepare
from megatron_eopt.checkpoint.requests import Lacking
from megatron_eopt.optimizers.member import Member
from megatron_eopt.optimizers.nested_state import leaves, put
from megatron_eopt.optimizers.sharded import ShardedOptimizer
from megatron_eopt.stores.dtensors import local_of, shard_like

MAINS = "fp32_from_fp16_params"
"""Key of the main weights in the state of megatron-core's wrapper for 16-bit parameters."""


def save(member: Member, main: str | None) -> dict[str, Any]:
    """Return the state of one optimizer of a chain: tensors, numbers, lists and dictionaries alone.

    That of fragments has groups, steps and loss scale only. As in megatron-core the main optimizer
    is the one that groups do not name.
    """
    storage: Any = member.storage
    if storage.is_stub_optimizer:
        return {}
    if not isinstance(storage, DistributedOptimizer):
        prepare([member], is_loading=False)
    result: dict[str, Any] = storage.state_dict()
    for group in result.get("optimizer", result)["param_groups"]:
        if group.get("optimizer") == main:
            group.pop("optimizer", None)
    if MAINS in result:
        # aliases without the attributes, which may be objects of our classes
        result[MAINS] = [[item.detach() for item in group] for group in result[MAINS]]
    return result


def load(members: Sequence[Member], state: Any, fresh: frozenset[str]) -> TakeT:
    """Check what :func:`save` returned for each optimizer of a chain; return what takes it over.

    Groups match by identity and keep the present run's schedule; state of the kinds ``fresh`` may
    be missing.

    Raises:
        ConfigurationError: If it has other optimizers or groups, or lacks state.
    """
    parts = _parts_for(members, state)
    loading = [
        _Loading(member, part, fresh)
        for member, part in zip(members, parts, strict=True)
        if not member.storage.is_stub_optimizer
    ]

    def take() -> Sequence[Lacking]:
        has_stepped = any(member.storage.steps for member in members)
        lacking = [item for one in loading for item in one.take()]
        return lacking if has_stepped else ()

    return take


def check_groups_alone(members: Sequence[Member], state: Any, *, enough: bool) -> None:
    """Raise unless ``state`` is what :func:`save` returns for optimizers of fragments.

    Raises:
        ConfigurationError: If it has other optimizers or groups, or state of parameters; or if
            groups are not ``enough``, since nothing else will load the state.
    """
    for member, part in zip(members, _parts_for(members, state), strict=True):
        inner = part.get("optimizer", part)
        numbers = [key for key in inner.get("state", {}) if isinstance(key, int)]
        if numbers:
            rule = "is of whole parameters, and this rank keeps fragments of them"
            way_out = "Resume from a torch_dist checkpoint, or without use_distributed_optimizer"
            raise ConfigurationError("state_dict", f"state of {len(numbers)}", rule, way_out)
        if not member.storage.is_stub_optimizer:
            match_all(inner.get("param_groups", ()), member.storage.optimizer.param_groups)
    if not enough:
        rule = "has neither state nor main weights, of which each rank keeps fragments"
        way_out = (
            "Load what sharded_state_dict(..., is_loading=True) returned, or use "
            "save_state_dict_to_file and load_state_dict_from_file"
        )
        raise ConfigurationError("state_dict", "parameter groups alone", rule, way_out)


def _parts_for(members: Sequence[Member], state: Any) -> list[Mapping[Any, Any]]:
    """Return the state of each optimizer, a ConfigurationError if it is another's."""
    parts = children_of(state)
    saved = [optimizers_of(saved_groups(part)) for part in parts]
    present = [
        optimizers_of(() if m.storage.is_stub_optimizer else m.storage.optimizer.param_groups)
        for m in members
    ]
    if not any(saved) and not any(present):
        return [{} for _ in members]
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
    return parts


class _Loading:
    """One optimizer's state, matched with what it keeps, and then written there."""

    def __init__(self, member: Member, part: Mapping[str, Any], fresh: frozenset[str]) -> None:
        self._member = member
        self._storage: Any = member.storage
        self._part = part
        prepare([member], is_loading=True)
        optimizer = self._storage.optimizer
        inner = part.get("optimizer", part)
        saved = inner.get("param_groups", ())
        twins = match_all(saved, optimizer.param_groups)
        self._groups = [*zip(optimizer.param_groups, (saved[t] for t in twins), strict=True)]
        states = inner.get("state", {})
        common = {STEP: states["common_step"]} if "common_step" in states else {}
        self._states = [
            (param, {**common, **states.get(number, {})})
            for present, its in self._groups
            for param, number in _numbered(present, its)
        ]
        may_lack = {id(main): fresh | driver.dispensable for driver, _, main in member.stepped()}
        missing = [
            f"parameter {number} of shape {tuple(param.shape)}: {kind}"
            for number, (param, values) in enumerate(self._states)
            for kind in sorted(optimizer.state[param].keys() - values.keys() - may_lack[id(param)])
        ]
        if missing:
            raise missing_state(missing)
        self._lacking: list[Lacking] = []
        for place, (param, values) in enumerate(self._states):
            own = optimizer.state[param]
            if lacking := (own.keys() & fresh) - values.keys():
                # moments mean nothing without each other, or with another count of steps
                anew = bool(lacking - MAY_BE_YOUNGER)
                self._lacking.append((own, set(own) if anew else lacking))
                self._states[place] = (param, {} if anew else values)
        if not isinstance(optimizer, ShardedOptimizer):
            for param, values in self._states:
                _check_shapes(param, optimizer.state[param], values)
        self._mains: list[tuple[Tensor, Tensor]] = []
        saved_mains = part.get(MAINS, ())
        present = getattr(self._storage, "fp32_from_float16_groups", ())
        for mains, twin in zip(present, twins, strict=False):
            its = saved_mains[twin] if twin < len(saved_mains) else ()
            if [local_of(a).shape for a in mains] != [local_of(b).shape for b in its]:
                raise _another(f"{len(its)} main weights ({MAINS}) of a group", len(mains))
            self._mains += zip(mains, its, strict=True)

    @torch.no_grad()
    def take(self) -> list[Lacking]:
        """Write everything to where it belongs; return the states that it lacks kinds of."""
        optimizer = self._storage.optimizer
        if isinstance(optimizer, ShardedOptimizer):
            self._take_dtensors(optimizer)
        else:
            for param, values in self._states:
                _take(optimizer.state[param], values)
        for target, value in self._mains:
            local_of(target).copy_(local_of(value))
        adopt_common([self._member], self._part)
        for group, its in self._groups:
            if STEP in its:
                group[STEP] = its[STEP]
        return self._lacking

    def _take_dtensors(self, optimizer: ShardedOptimizer) -> None:
        """Hand over state of shards, and of whole matrices; collective."""
        present = optimizer.param_groups
        groups = [
            {**group, "params": [id(param) for param in group["params"]]} for group in present
        ]
        states = {
            id(param): {kind: _shard(param, value) for kind, value in values.items()}
            for param, values in self._states
        }
        optimizer.load_state_dict({"state": states, "param_groups": groups})


def _numbered(present: Mapping[str, Any], its: Mapping[str, Any]) -> Iterator[tuple[Tensor, Any]]:
    numbers, params = its.get("params", ()), present["params"]
    if len(numbers) != len(params):
        raise _another(f"{len(numbers)} parameters in group {present.get('group_id')}", len(params))
    return zip(params, numbers, strict=True)


def _another(found: str, wanted: int) -> ConfigurationError:
    return ConfigurationError(
        "state_dict",
        found,
        f"this rank has {wanted} of them, in shapes that must be the same",
        "Resume with the same model and precision in the same parallel layout, or from a "
        "torch_dist checkpoint",
    )


def _check_shapes(param: Tensor, kept: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    for kind in kept.keys() & values.keys():
        if _shapes(kept[kind]) != _shapes(values[kind]):
            raise ConfigurationError(
                "state_dict",
                f"{kind} of {_describe(values[kind])}",
                f"must be of {_describe(kept[kind])}, for a parameter of shape "
                f"{tuple(param.shape)}",
                "Resume with the settings and the tensor-parallel size of the run that wrote the "
                "checkpoint, or start this state anew with checkpoint_fresh_state",
            )


def _shapes(value: Any) -> dict[tuple[str, ...], tuple[int, ...] | None]:
    """Return the shape of each tensor or number."""
    return {path: _shape(leaf) for path, leaf in leaves(value)}


def _shape(leaf: Any) -> tuple[int, ...] | None:
    if not isinstance(leaf, Tensor | int | float):
        return None
    shape = torch.as_tensor(leaf).shape
    # a single number may have any dimensions
    return () if shape.numel() == 1 else tuple(shape)


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
    is_local = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.dim()
    return shard_like(param, value) if is_local else value


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"pieces [{', '.join(map(_describe, value))}]"
    return type(value).__name__
