"""State in checkpoints of format ``fsdp_dtensor``: DTensors by parameter, as megatron-core has it.

``optimizer.state.{parameter}.{kind}``; state of whole matrices lies there too, cut by rows. The
trainer splits gate and up of a SwiGLU's first weight, ``{parameter}_w`` and ``{parameter}_v``, so
that both load under another tensor parallelism; what is cut like that weight is split like it.
Every rank has the same keys, whatever it holds, since finding out who holds what is collective.
"""

import inspect
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.base.names import MOMENTUM, STEP
from megatron_eopt.base.upstream import needed, owner_of
from megatron_eopt.checkpoint.groups import adopt
from megatron_eopt.checkpoint.local_state import hand_over
from megatron_eopt.checkpoint.migration import begin_together, missing_state, shortened
from megatron_eopt.checkpoint.optimizer_state import prepare
from megatron_eopt.checkpoint.saved_state import MAINS
from megatron_eopt.optimizers.stepper import Stepper

FORMAT = "fsdp_dtensor"
"""The trainer's name of the format."""

GROUPS = "param_to_group_meta"
"""Key of the settings of every parameter's group."""

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
    # parameters of one group may be read from several
    return {"state": state, GROUPS: {name: dict(meta) for name, meta in metas.items()}}


def load(stepper: Stepper, loaded: Mapping[str, Any]) -> None:
    """Take over what was loaded into :func:`requested`; collective.

    Raises:
        ConfigurationError: If state is missing.
    """
    storage: Any = stepper.storage
    optimizer, state = storage.optimizer, loaded["state"]
    steps = max((int(meta.get(STEP, 0)) for meta in loaded[GROUPS].values()), default=0)
    states = {}
    for group in optimizer.param_groups:
        names = [storage._param_name(param) for param in group["params"]]
        for param, name in zip(group["params"], names, strict=True):
            kept = optimizer.state[param]
            found = {**state.get(name + _FIRST_HALF, {}), **state.get(name, {})}
            if STEP in kept and STEP not in found and MOMENTUM in found:
                # nobody counted this parameter's steps
                found[STEP] = torch.full_like(kept[STEP], steps)
            # what is cut like the parameter has been read in place
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
    """Raise unless a checkpoint, which has ``keys``, has all state of :func:`requested`.

    State of the kinds ``fresh`` may be missing, and is no longer asked for then, nor is what it
    goes with. Settings of groups that it lacks are no longer asked for either, nor are kinds to
    ``spare``. What it has besides is left out.

    Returns:
        What starts fresh, a line for each kind.

    Raises:
        ConfigurationError: If state is missing, with the parameters and what they lack.
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
    """Return one parameter's state by name, in two parts where the parameter is saved in two."""
    name, chunk = storage._param_name(param), storage.model_chunks[0]
    if not chunk.config.gated_linear_unit:
        return {name: dict(values)}
    # megatron-core splits weights of the model inside, by their names; state has the same shapes
    inside = needed("expert_param_local_key")(name, chunk.config.num_moe_experts)
    inside = inside.removeprefix("module.module.")
    # as they are saved: what is kept between steps may be 8 bits of them
    kept = storage.optimizer.state[param]
    cut = {k: values[k] for k, v in kept.items() if isinstance(v, DTensor) and k in values}
    # what stands around it for the trainer expects the trainer's model
    splitting = inspect.unwrap(owner_of("expert_param_local_key").handle_swiglu_in_state_dict)
    names, _ = splitting(chunk.module, {inside: param.detach()}, None)
    parts: dict[str, dict[str, Any]] = {name + part.removeprefix(inside): {} for part in names}
    for kind, value in cut.items():
        split, _ = splitting(chunk.module, {inside: value}, None)
        for part, tensor in split.items():
            parts[name + part.removeprefix(inside)][kind] = tensor
    next(iter(parts.values())).update({k: v for k, v in values.items() if k not in cut})
    return {part: state for part, state in parts.items() if state}
