"""State in checkpoints of format ``fsdp_dtensor``: DTensors by parameter, as in megatron-core.

Keys are ``optimizer.state.{parameter}.{kind}``. State of whole matrices is sharded by rows. The
trainer splits the first weight of a SwiGLU into ``{parameter}_w`` and ``{parameter}_v`` (gate and
up), so that it loads with another tensor-parallel size; state of its shape is split in the same
way. All ranks have the same keys, because the layout of each DTensor is exchanged collectively.
"""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.base.agreement import raise_together
from megatron_eopt.base.names import FIRST_MOMENT, MAINS, MOMENTUM, STEP
from megatron_eopt.base.upstream import owner_of, require_upstream
from megatron_eopt.checkpoint.catalogue import Catalogue
from megatron_eopt.checkpoint.continuation import (
    Note,
    Policy,
    Reader,
    Report,
    SavedState,
    Wanted,
)
from megatron_eopt.checkpoint.optimizer_state import prepare
from megatron_eopt.checkpoint.saved_groups import BY_PARAMETER, adopt, identity_of, state_in

FORMAT = "fsdp_dtensor"
"""The trainer's name for the format."""

_FIRST_HALF = "_w"


def requested(storage: Any, *, is_loading: bool) -> dict[str, Any]:
    """Return what the trainer saves, or loads in place, of a chain's only optimizer; collective."""
    prepare([storage], is_loading=is_loading)
    packed = storage.optimizer.state_dict()
    state: dict[str, dict[str, Any]] = {}
    for group, its in zip(storage.optimizer.param_groups, packed["param_groups"], strict=True):
        for param, number in zip(group["params"], its["params"], strict=True):
            state |= _in_parts(storage, param, packed["state"].get(number, {}))
    groups = [{**group, STEP: storage.steps} for group in storage.optimizer.param_groups]
    metas = storage._param_groups_to_param2group_meta(groups)
    # a copy for each parameter, because parameters of one group may be read from several groups
    return {"state": state, BY_PARAMETER: {name: dict(meta) for name, meta in metas.items()}}


def load(storage: Any, loaded: Mapping[str, Any]) -> None:
    """Pass what was loaded into :func:`requested` to the optimizer; collective.

    Raises:
        ConfigurationError: If state is missing.
    """
    optimizer, state = storage.optimizer, loaded["state"]
    # all groups step together, so the largest count is that of all
    steps = max((int(meta.get(STEP, 0)) for meta in loaded[BY_PARAMETER].values()), default=0)
    states = {}
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        name, kept = storage._param_name(param), optimizer.state[param]
        found = {**state.get(name + _FIRST_HALF, {}), **state.get(name, {})}
        if STEP in kept and STEP not in found and MOMENTUM in found:
            # the checkpoint has no step count for this parameter
            found[STEP] = torch.full_like(kept[STEP], steps)
        for key, own in kept.items():
            if isinstance(own, DTensor):
                # loaded in place, maybe from another kind of state, into parts of this DTensor
                read = FIRST_MOMENT if key == MOMENTUM and key not in found else key
                found |= {read: own} if read in found else {}
        states[optimizer.names[param]] = found
    names = {storage._param_name(param): name for param, name in optimizer.names.items()}
    groups = [{**meta, "params": [names[name]]} for name, meta in loaded[BY_PARAMETER].items()]
    # settings that only the checkpoint has tell which optimizer wrote it
    told = {names.get(its["params"][0]): its for its in storage.loaded_groups}
    whole = [{**told.get(group["params"][0], {}), **group} for group in groups]
    # in torch's form, with one group for each parameter
    state_dict = {"state": states, "param_groups": whole}
    # what may be missing was decided before the load
    kinds = frozenset(kind for values in optimizer.state.values() for kind in values)
    policy = Policy(kinds, momentum_from_adam=True)
    optimizer.allocate_for_load()
    _, taken = raise_together(lambda: optimizer.checked(state_dict, policy))
    for group in optimizer.param_groups:
        names_of = {identity_of(group): [optimizer.names[param] for param in group["params"]]}
        adopt(group, groups, names_of)
    storage.loaded_groups = groups
    optimizer.take(taken)
    storage.steps = steps


type Readers = Mapping[str, tuple[Reader, frozenset[str]]]
"""The optimizer of each parameter by name, with the kinds of its state that may be missing."""


def readers_of(storage: Any) -> Readers:
    """Return the optimizer of each parameter."""
    return {
        storage._param_name(main): (
            Reader.of(update_rule.name, group),
            update_rule.optional_state,
        )
        for update_rule in storage.update_rules
        for group, main, _ in update_rule.numbered(storage.groups_of(update_rule))
    }


def match(
    wanted: Mapping[str, Any],
    readers: Readers,
    catalogue: Catalogue,
    policy: Policy,
    *,
    has_stepped: bool,
) -> list[Note]:
    """Match ``wanted``, from :func:`requested`, with a checkpoint.

    Removes what the checkpoint lacks and may lack, so that everything in ``wanted`` is loaded in
    place. Other state of the checkpoint is ignored.

    Args:
        wanted: What to load; changed in place.
        readers: From :func:`readers_of`.
        catalogue: What the checkpoint has.
        policy: What may differ.
        has_stepped: Whether the optimizer has stepped, so that its state cannot start fresh.

    Returns:
        What starts fresh or is converted.

    Raises:
        ConfigurationError: If state is missing, does not fit, or cannot start fresh.
    """
    report = Report(policy)
    for name, values in wanted["state"].items():
        # a weight that is saved in two parts has one group
        whole = name if name in readers else name[: -len(_FIRST_HALF)]
        reader, spare = readers[whole]
        saved = _state_in(catalogue, name, whole, reader.name)
        misfit = functools.partial(_misfit, catalogue, name, values)
        asked = Wanted(name, reader, frozenset(values.keys() - MAINS - {STEP}), spare)
        found = report.decide(asked, saved, misfit)
        for kind in values.keys() - found.origins.keys() - MAINS:
            if kind != STEP or found.fresh or kind not in catalogue.state.get(name, {}):
                del values[kind]
        for kind, origin in found.origins.items():
            if origin.key != kind:
                # the tensor stays, and is filled with what the other key has; ``load`` renames it
                # back
                values[origin.key] = values.pop(kind)
    report.refuse("checkpoint", has_stepped=has_stepped)
    for name, meta in wanted[BY_PARAMETER].items():
        there = catalogue.settings.get(name, {})
        for setting in meta.keys() - there.keys():
            del meta[setting]
    return report.notes


def _state_in(catalogue: Catalogue, name: str, whole: str, reader: str) -> SavedState:
    """Return what a checkpoint has of a parameter, or of a part of one."""
    keys = catalogue.state.get(name, {}).keys() - MAINS - {STEP}
    return state_in([catalogue.settings.get(whole, {})], keys, reader)


def _misfit(
    catalogue: Catalogue, name: str, values: Mapping[str, Any], kind: str, other: str
) -> str | None:
    own, shape = values[kind], catalogue.state[name][other].shape
    if not isinstance(own, Tensor) or shape in (None, tuple(own.shape)):
        return None
    return f"of shape {shape} must have shape {tuple(own.shape)}"


@torch.no_grad()
def _in_parts(storage: Any, param: Tensor, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a parameter's state by name; two entries if the parameter is saved in two parts."""
    name, chunk = storage._param_name(param), storage.model_chunks[0]
    if not chunk.config.gated_linear_unit:
        return {name: dict(values)}
    # megatron-core splits weights by their names in the inner model; state has the same shapes
    inside = require_upstream("expert_param_local_key")(name, chunk.config.num_moe_experts)
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
