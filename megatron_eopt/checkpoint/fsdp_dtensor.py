"""State in checkpoints of format ``fsdp_dtensor``: DTensors by parameter, as in megatron-core.

Keys are ``optimizer.state.{parameter}.{kind}``. State of whole matrices is sharded by rows. The
trainer splits the first weight of a SwiGLU into ``{parameter}_w`` and ``{parameter}_v`` (gate and
up), so that it loads with another tensor-parallel size; state of its shape is split in the same
way. All ranks have the same keys, because the layout of each DTensor is exchanged collectively.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.base.agreement import raise_together
from megatron_eopt.base.names import MAIN_KINDS, STEP
from megatron_eopt.checkpoint.catalogue import Catalogue
from megatron_eopt.checkpoint.keys import Saved
from megatron_eopt.checkpoint.optimizer_state import prepare
from megatron_eopt.megatron_core.upstream import owner_of, require_upstream
from megatron_eopt.state.groups import BY_PARAMETER, continue_groups
from megatron_eopt.state.rule import (
    LoadReport,
    SavedState,
    Writer,
    identity_of,
    log_lines,
    state_kinds,
)

FORMAT = "fsdp_dtensor"
"""The trainer's name for the format."""

_FIRST_HALF, _SECOND_HALF = "_w", "_v"


def requested(storage: Any, *, is_loading: bool) -> dict[str, Any]:
    """Return what the trainer saves, or loads in place, of a chain's only optimizer; collective."""
    storage.fresh = None
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
    # all groups step together, so the largest count is that of all
    steps = max((int(meta.get(STEP, 0)) for meta in metas.values()), default=0)
    if storage.fresh is None:
        # what nobody has matched before it was read is all that was asked for
        report = raise_together(lambda: match(storage, loaded, _as_read(loaded)))
        log_lines(report.lines)
    fresh, storage.fresh = storage.fresh, None
    optimizer.allocate_for_load()
    loads: dict[Tensor, Mapping[str, Any] | None] = {}
    for param in optimizer.names:
        name, current = storage._param_name(param), optimizer.state[param]
        if name in fresh:
            loads[param] = None
            continue
        read = {**state.get(name + _FIRST_HALF, {}), **state.get(name, {})}
        # a DTensor was loaded in place, maybe in parts
        cut = {k: v for k, v in current.items() if isinstance(v, DTensor) and k in read}
        count = {STEP: read.get(STEP, steps)} if STEP in current else {}
        loads[param] = read | cut | count
    names = {storage._param_name(param): name for param, name in optimizer.names.items()}
    groups = [{**meta, "params": [names[name]]} for name, meta in metas.items()]
    members = {
        identity_of(group): [optimizer.names[param] for param in group["params"]]
        for group in optimizer.param_groups
    }
    storage.twins = continue_groups(optimizer.param_groups, groups, members)
    storage.loaded_groups = groups
    optimizer.load_checked(loads)
    storage.steps = steps


def _as_read(loaded: Mapping[str, Any]) -> Catalogue:
    """Return the catalogue of a checkpoint that has all that was asked for."""
    values = {
        f"{name}.{k}": Saved(k, name) for name, kinds in loaded["state"].items() for k in kinds
    }
    return Catalogue(FORMAT, values, settings=loaded[BY_PARAMETER])


def match(storage: Any, wanted: Mapping[str, Any], catalogue: Catalogue) -> LoadReport:
    """Match ``wanted``, from :func:`requested`, with a checkpoint; see Note [Load rule].

    Removes what starts fresh or what the checkpoint may lack, so that everything in ``wanted`` is
    loaded in place. Other state of the checkpoint is ignored.

    Args:
        storage: The chain's only optimizer, which notes what starts fresh.
        wanted: What to load; changed in place.
        catalogue: What the checkpoint has.

    Raises:
        ConfigurationError: If state is missing, does not fit, or cannot start fresh.
    """
    report = LoadReport()
    for name, reader, optional in _readers(storage):
        # a weight that is saved in two parts has one group, and its state one outcome
        parts = [
            (wanted["state"][part], catalogue.state.get(part, {}))
            for part in (name, name + _FIRST_HALF, name + _SECOND_HALF)
            if part in wanted["state"]
        ]
        own = {kind for values, _ in parts for kind in values}
        kinds = {kind for _, there in parts for kind in there}
        settings = catalogue.settings.get(name)
        writers = () if settings is None else (Writer.of(settings),)
        saved = SavedState(state_kinds(kinds), writers)

        def misfit(kind: str, parts: Any = parts) -> str | None:
            return next(_misfits(parts, kind), None)

        required = state_kinds(own) - optional
        if not report.continues(name, reader, required, misfit, saved):
            kinds &= MAIN_KINDS
        for values, there in parts:
            for kind in values.keys() - MAIN_KINDS - (kinds & there.keys()):
                del values[kind]
    report.refuse("checkpoint", has_stepped=storage.steps > 0)
    for name, meta in wanted[BY_PARAMETER].items():
        for setting in meta.keys() - catalogue.settings.get(name, {}).keys():
            del meta[setting]
    storage.fresh = report.fresh
    return report


def _readers(storage: Any) -> Iterator[tuple[str, Writer, frozenset[str]]]:
    """Yield each parameter's name and optimizer, with the kinds of state that may be missing."""
    for item in storage.assigned:
        for group, main, _ in item.rule.numbered(item.groups()):
            name = storage._param_name(main)
            yield name, Writer.of(group, item.rule.name), item.rule.optional_state


def _misfits(
    parts: Sequence[tuple[Mapping[str, Any], Mapping[str, Saved]]], kind: str
) -> Iterator[str]:
    """Yield why a parameter's saved state cannot be loaded."""
    for values, there in parts:
        if kind in values and kind not in there:
            yield "is of a part of the weight only"
            continue
        wanted, shape = values.get(kind), there[kind].shape if kind in there else None
        if isinstance(wanted, Tensor) and shape not in (None, tuple(wanted.shape)):
            yield f"of shape {shape} must have shape {tuple(wanted.shape)}"


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
