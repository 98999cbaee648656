"""State in checkpoints of format ``fsdp_dtensor``: DTensors by parameter, as in megatron-core.

Keys are ``optimizer.state.{parameter}.{kind}``. State of whole matrices is sharded by rows. The
trainer splits the first weight of a SwiGLU into ``{parameter}_w`` and ``{parameter}_v`` (gate and
up), so that it loads with another tensor-parallel size; state of its shape is split in the same
way. All ranks have the same keys, because the layout of each DTensor is exchanged collectively.
"""

import inspect
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.base.names import MOMENTUM, STEP
from megatron_eopt.base.upstream import needed, owner_of
from megatron_eopt.checkpoint.groups import adopt, check_schedule
from megatron_eopt.checkpoint.local_state import hand_over
from megatron_eopt.checkpoint.migration import begin_together, missing_state, shortened
from megatron_eopt.checkpoint.optimizer_state import prepare
from megatron_eopt.checkpoint.saved_state import MAINS
from megatron_eopt.optimizers.stepper import Stepper

FORMAT = "fsdp_dtensor"
"""The trainer's name for the format."""

GROUPS = "param_to_group_meta"
"""Key of the group settings by parameter."""

_FIRST_HALF = "_w"
_STATE = "optimizer.state."


def requested(stepper: Stepper, *, is_loading: bool) -> dict[str, Any]:
    """Return what the trainer saves, or loads in place, of a chain's only optimizer; collective."""
    storage: Any = stepper.storage
    prepare([stepper], is_loading=is_loading)
    packed = storage.optimizer.state_dict()
    state: dict[str, dict[str, Any]] = {}
    for group, its in zip(storage.optimizer.param_groups, packed["param_groups"], strict=True):
        for param, number in zip(group["params"], its["params"], strict=True):
            state |= _in_parts(storage, param, packed["state"].get(number, {}))
    groups = [{**group, STEP: storage.steps} for group in storage.optimizer.param_groups]
    metas = storage._param_groups_to_param2group_meta(groups)
    # a copy for each parameter, because parameters of one group may be read from several groups
    return {"state": state, GROUPS: {name: dict(meta) for name, meta in metas.items()}}


def load(stepper: Stepper, loaded: Mapping[str, Any]) -> None:
    """Pass what was loaded into :func:`requested` to the optimizer; collective.

    Raises:
        ConfigurationError: If state is missing.
    """
    storage: Any = stepper.storage
    optimizer, state = storage.optimizer, loaded["state"]
    steps = max((int(meta.get(STEP, 0)) for meta in loaded[GROUPS].values()), default=0)
    states = {}
    check_schedule(
        [group for group in optimizer.param_groups if group["params"]],
        [meta for meta in loaded[GROUPS].values() if meta],
    )
    for group in optimizer.param_groups:
        names = [storage._param_name(param) for param in group["params"]]
        for param, name in zip(group["params"], names, strict=True):
            kept = optimizer.state[param]
            found = {**state.get(name + _FIRST_HALF, {}), **state.get(name, {})}
            if STEP in kept and STEP not in found and MOMENTUM in found:
                # the checkpoint has no step count for this parameter
                found[STEP] = torch.full_like(kept[STEP], steps)
            # DTensors were loaded in place
            cut = {kind: value for kind, value in kept.items() if isinstance(value, DTensor)}
            states[param] = {**found, **cut}
        adopt(group, [loaded[GROUPS].get(name, {}) for name in names])
    hand_over(optimizer, states)
    storage.steps = steps


def match(
    wanted: Mapping[str, Any],
    keys: Container[str],
    fresh: Container[str],
    spare: frozenset[str],
) -> list[str]:
    """Match ``wanted``, from :func:`requested`, with a checkpoint that has ``keys``.

    Removes what the checkpoint lacks: kinds of state in ``fresh``, with the kinds that depend on
    them, kinds in ``spare``, and group settings. Other state of the checkpoint is ignored.

    Returns:
        A line for each kind of state that starts fresh.

    Raises:
        ConfigurationError: If other state is missing; names the parameters and kinds.
    """
    missing: list[str] = []
    names_of: dict[str, list[str]] = {}
    for name, values in wanted["state"].items():
        there = {kind for kind in values if f"{_STATE}{name}.{kind}" in keys}
        lacking = values.keys() - there - spare
        missing += [f"{name}: {kind}" for kind in sorted(lacking) if kind not in fresh]
        begin = begin_together(values.keys() - MAINS, lacking) | lacking
        for kind in values.keys() - (there - begin):
            del values[kind]
        for kind in begin:
            names_of.setdefault(kind, []).append(name)
    if missing:
        raise missing_state(missing)
    for name, meta in wanted[GROUPS].items():
        for setting in [s for s in meta if f"optimizer.{GROUPS}.{name}.{s}" not in keys]:
            del meta[setting]
    return [
        f"{kind} starts fresh: {len(names)} parameter(s): {shortened(names)}"
        for kind, names in sorted(names_of.items())
    ]


@torch.no_grad()
def _in_parts(storage: Any, param: Tensor, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a parameter's state by name; two entries if the parameter is saved in two parts."""
    name, chunk = storage._param_name(param), storage.model_chunks[0]
    if not chunk.config.gated_linear_unit:
        return {name: dict(values)}
    # megatron-core splits weights by their names in the inner model; state has the same shapes
    inside = needed("expert_param_local_key")(name, chunk.config.num_moe_experts)
    inside = inside.removeprefix("module.module.")
    # values in the form to save; the optimizer may keep 8-bit values between steps
    kept = storage.optimizer.state[param]
    cut = {k: values[k] for k, v in kept.items() if isinstance(v, DTensor) and k in values}
    # without the wrapper of megatron_eopt.checkpoint.trainer, which expects the trainer's model
    splitting = inspect.unwrap(owner_of("expert_param_local_key").handle_swiglu_in_state_dict)
    names, _ = splitting(chunk.module, {inside: param.detach()}, None)
    parts: dict[str, dict[str, Any]] = {name + part.removeprefix(inside): {} for part in names}
    for kind, value in cut.items():
        split, _ = splitting(chunk.module, {inside: value}, None)
        for part, tensor in split.items():
            parts[name + part.removeprefix(inside)][kind] = tensor
    next(iter(parts.values())).update({k: v for k, v in values.items() if k not in cut})
    return {part: state for part, state in parts.items() if state}
