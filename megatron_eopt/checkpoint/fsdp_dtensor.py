"""State in checkpoints of format ``fsdp_dtensor``: DTensors by parameter, as in megatron-core.

Keys are ``optimizer.state.{parameter}.{kind}``. State of whole matrices is sharded by rows. The
trainer splits the first weight of a SwiGLU into ``{parameter}_w`` and ``{parameter}_v`` (gate and
up), so that it loads with another tensor-parallel size; state of its shape is split in the same
way. All ranks have the same keys, because the layout of each DTensor is exchanged collectively.
"""

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.base.agreement import raise_together
from megatron_eopt.base.names import MAINS, MOMENTUM, STEP
from megatron_eopt.base.upstream import owner_of, require_upstream
from megatron_eopt.checkpoint.catalogue import Catalogue
from megatron_eopt.checkpoint.continuation import (
    Continuation,
    LoadReport,
    Note,
    Policy,
    Reader,
    log_notes,
)
from megatron_eopt.checkpoint.keys import Saved
from megatron_eopt.checkpoint.optimizer_state import prepare
from megatron_eopt.checkpoint.saved_groups import BY_PARAMETER, adopt, identity_of, state_in
from megatron_eopt.checkpoint.state_dicts import Loaded, is_users

FORMAT = "fsdp_dtensor"
"""The trainer's name for the format."""

_FIRST_HALF, _SECOND_HALF = "_w", "_v"


def requested(storage: Any, *, is_loading: bool) -> dict[str, Any]:
    """Return what the trainer saves, or loads in place, of a chain's only optimizer; collective."""
    storage.decided = {}
    prepare([storage], is_loading=is_loading)
    packed = storage.optimizer.state_dict()
    state: dict[str, dict[str, Any]] = {}
    for group, numbered in zip(storage.optimizer.param_groups, packed["param_groups"], strict=True):
        for param, number in zip(group["params"], numbered["params"], strict=True):
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
    optimizer, state, metas = storage.optimizer, loaded["state"], loaded[BY_PARAMETER]
    readers = readers_of(storage)
    # all groups step together, so the largest count is that of all
    steps = max((int(meta.get(STEP, 0)) for meta in metas.values()), default=0)
    # what nobody has matched before it was read is all that was asked for
    decided = storage.decided or raise_together(lambda: _decided_now(storage, readers, loaded))
    storage.decided = {}
    optimizer.allocate_for_load()
    loads = {}
    for param in optimizer.names:
        name, current = storage._param_name(param), optimizer.state[param]
        read = {**state.get(name + _FIRST_HALF, {}), **state.get(name, {})}
        continuation = decided[name]
        # a DTensor was loaded in place, maybe in parts
        values = {
            key: current[key] if isinstance(current.get(key), DTensor) else read[origin.key]
            for key, origin in continuation.origins.items()
        }
        if STEP in current and not continuation.fresh:
            values[STEP] = read.get(STEP, steps)
        of_user = {k: value for k, value in read.items() if is_users(readers[name][0].name, k)}
        loads[param] = Loaded.by(continuation, values, of_user)
    names = {storage._param_name(param): name for param, name in optimizer.names.items()}
    groups = [{**meta, "params": [names[name]]} for name, meta in metas.items()]
    members = {
        identity_of(group): [optimizer.names[param] for param in group["params"]]
        for group in optimizer.param_groups
    }
    storage.twins = [adopt(group, groups, members) for group in optimizer.param_groups]
    storage.loaded_groups = groups
    optimizer.take(loads)
    storage.steps = steps


def _decided_now(storage: Any, readers: "Readers", loaded: Mapping[str, Any]) -> "Decided":
    """Return where state comes from whose keys and groups have been read as they are here."""
    values = {
        f"{name}.{k}": Saved(k, name) for name, kinds in loaded["state"].items() for k in kinds
    }
    catalogue = Catalogue(FORMAT, values, settings=loaded[BY_PARAMETER])
    policy, has_stepped = storage.optimizer.policy, storage.steps > 0
    decided, notes = match(loaded, readers, catalogue, policy, has_stepped=has_stepped)
    log_notes(notes)
    return decided


type Decided = Mapping[str, Continuation]
"""Where the state of each parameter comes from, by name."""

type Readers = Mapping[str, tuple[Reader, frozenset[str]]]
"""The optimizer of each parameter by name, with the kinds of its state that may be missing."""


def readers_of(storage: Any) -> Readers:
    """Return the optimizer of each parameter."""
    return {
        storage._param_name(main): (Reader.of(item.rule.name, group), item.rule.optional_state)
        for item in storage.assigned
        for group, main, _ in item.rule.numbered(item.groups())
    }


def match(
    wanted: Mapping[str, Any],
    readers: Readers,
    catalogue: Catalogue,
    policy: Policy,
    *,
    has_stepped: bool,
) -> tuple[Decided, list[Note]]:
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
        Where the state of each parameter comes from, and what starts fresh or is converted.

    Raises:
        ConfigurationError: If state is missing, does not fit, or cannot start fresh.
    """
    report = LoadReport(policy)
    decided = {}
    for name, (reader, spare) in readers.items():
        # a weight that is saved in two parts has one group, and its state one origin
        parts = [
            (wanted["state"][part], catalogue.state.get(part, {}))
            for part in (name, name + _FIRST_HALF, name + _SECOND_HALF)
            if part in wanted["state"]
        ]
        settings = catalogue.settings.get(name, {})
        asked = {k for values, _ in parts for k in values if not is_users(reader.name, k)}
        kinds = {kind for _, there in parts for kind in there}
        saved = state_in([settings], kinds - MAINS - {STEP}, reader.name)
        keys = frozenset(asked - MAINS - {STEP})
        misfit = functools.partial(_misfit, parts)
        outcome = decided[name] = report.decide(name, reader, keys, saved, misfit, spare)
        # megatron-core has no count beside a momentum
        if STEP in asked - kinds - settings.keys() and outcome.origins.keys() - {MOMENTUM}:
            report.lack(name, STEP)
        for values, there in parts:
            for kind in values.keys() - MAINS:
                if kind in outcome.origins:
                    # the tensor stays, and is filled with what the other key has
                    values[outcome.origins[kind].key] = values.pop(kind)
                elif kind in keys or kind not in there or (kind == STEP and outcome.fresh):
                    del values[kind]
    report.refuse("checkpoint", has_stepped=has_stepped)
    for name, meta in wanted[BY_PARAMETER].items():
        there = catalogue.settings.get(name, {})
        for setting in meta.keys() - there.keys():
            del meta[setting]
    return decided, report.notes


def _misfit(
    parts: Sequence[tuple[Mapping[str, Any], Mapping[str, Saved]]], kind: str, other: str
) -> str | None:
    """Return why a parameter's saved state cannot be loaded; None if it can."""
    for values, there in parts:
        if kind in values and other not in there:
            return "is of a part of the weight only"
        wanted, shape = values.get(kind), there[other].shape if other in there else None
        if isinstance(wanted, Tensor) and shape not in (None, tuple(wanted.shape)):
            return f"of shape {shape} must have shape {tuple(wanted.shape)}"
    return None


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
    current = storage.optimizer.state[param]
    cut = {k: values[k] for k, v in current.items() if isinstance(v, DTensor) and k in values}
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
