"""What a run asks for against what a checkpoint has, agreed over all ranks before anything is read.

An optimizer asks for state by requests that can be adapted: to another optimizer's checkpoint, or
to state that may start fresh. Whatever remains unmatched is an error that lists parameters.
"""

import functools
import logging
import operator
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from torch import distributed
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_eopt.base.agreement import (
    CheckpointError,
    agreed,
    device_of_collectives,
    everyones,
    from_rank_0,
    is_rank_0,
)
from megatron_eopt.base.upstream import needed
from megatron_eopt.checkpoint.keys import saved_keys, split_key, tensors
from megatron_eopt.checkpoint.migration import SLAB, Policy
from megatron_eopt.checkpoint.requests import StateRequests
from megatron_eopt.checkpoint.saved_state import Shapes

logger = logging.getLogger(__name__)

MAY_LACK_KEYS = ("log_all", "return_all", "ignore_all")
"""Values of megatron-core's ``strict`` that let a checkpoint lack what is asked for."""

_SHOWN = 8


def match(
    sharded_state_dict: Any,
    folder: Path,
    policy: Policy,
    *,
    strict: str = "assume_ok_unexpected",
    whole_model: bool = False,
) -> None:
    """Adapt a sharded state dict to the checkpoint that it is about to be loaded from, in place.

    All ranks call this together, and all raise the same CheckpointError or nothing. ``folder``
    holds the checkpoint, in the format torch_dist; ``strict`` is as in ``dist_checkpointing.load``;
    with ``whole_model`` model tensors that nobody asks for are an error, too.
    """
    shapes = from_rank_0(lambda: _shapes(folder))
    requests = list(_requests(sharded_state_dict))
    policy = functools.reduce(operator.or_, (item.policy for item in requests), policy)
    own = _keys(sharded_state_dict, requests).union(*(item.own_keys() for item in requests))
    may_lack = strict.lower() in MAY_LACK_KEYS
    # the model first: if that is another one, its optimizer's state says the same less clearly
    model = [item for item in tensors(sharded_state_dict) if split_key(item.key) is None]
    _refuse_differences(model, shapes, folder, may_lack)
    lines = agreed(lambda: [line for r in requests for line in r.adapt(shapes, policy)])
    _log(everyones(lines))
    _refuse_differences(tensors(sharded_state_dict), shapes, folder, may_lack)
    there = sorted(key for key, shape in shapes.items() if shape is not None or _is_of_param(key))
    left_over = _left_over(there, _keys(sharded_state_dict, requests), own)
    _refuse_left_over_state(left_over, policy.fresh, folder)
    extra = [key for key in left_over if split_key(key) is None]
    if extra and whole_model and not may_lack:
        rule = f"was written by another model; tensors that this one lacks: {_shown(extra)}"
        way_out = "Load it with the model's flags of the run that wrote it, or with --finetune"
        raise _unfit(folder, rule, way_out)


def _shapes(folder: Path) -> Shapes:
    try:
        # whatever megatron-core is going to read the checkpoint with
        metadata = needed("FileSystemReader")(folder).read_metadata().state_dict_metadata
    except Exception as error:
        rule = f"its metadata cannot be read ({type(error).__name__}: {error})"
        way_out = "Load another iteration with --ckpt-step, or restore the folder"
        raise _unfit(folder, rule, way_out) from error
    return {
        key: tuple(item.size) if isinstance(item, TensorStorageMetadata) else None
        for key, item in metadata.items()
    }


def _requests(state: Any) -> Iterator[StateRequests]:
    # nested_values of megatron-core would look into the requests' own containers
    if isinstance(state, Mapping):
        state = list(state.values())
    if isinstance(state, list | tuple):
        for value in state:
            yield from _requests(value)
    elif isinstance(state, LocalNonpersistentObject) and isinstance(state.obj, StateRequests):
        yield state.obj


def _keys(sharded_state_dict: Any, requests: Iterable[StateRequests]) -> set[str]:
    return saved_keys(sharded_state_dict).union(*(item.keys() for item in requests))


def _log(lines: Iterable[str]) -> None:
    if is_rank_0():
        for line in lines:
            logger.warning("%s", line)


def _refuse_differences(
    wanted: Iterable[ShardedTensor], shapes: Shapes, folder: Path, may_lack: bool
) -> None:
    """Raise if a tensor that is asked for is missing or has another global shape."""
    missing, differing = set(), set()
    for item in wanted:
        shape = shapes.get(item.key)
        if shape is None:
            missing.add(item.key)
        elif shape != tuple(item.global_shape) and not item.allow_shape_mismatch:
            differing.add(f"{item.key} {shape} instead of {tuple(item.global_shape)}")
    lacking = [] if may_lack else sorted(everyones(sorted(missing)))
    if other := sorted(everyones(sorted(differing))):
        rule = f"was written by another model; tensors of another shape: {_shown(other)}"
        raise _unfit(folder, rule, "Load it with the model's flags of the run that wrote it")
    if lacking:
        rule = f"lacks tensors that this run asks for: {_shown(lacking)}"
        if all(split_key(key) is None for key in lacking):
            way_out = (
                "Load it with the model's flags of the run that wrote it; a model that has more "
                "begins from a checkpoint that was written with all of it"
            )
            raise _unfit(folder, rule, way_out)
        raise _unfit(
            folder,
            rule,
            "Load it with the model, the optimizer and, if its optimizer state is in buckets "
            "(dp_reshardable), the layout of the run that wrote it, or without optimizer state "
            "(--no-load-optim)",
        )


def _is_of_param(key: str) -> bool:
    """Return whether a key is of a parameter's or a matrix's state.

    Other objects (random numbers, settings) are read or left by rules of their own.
    """
    parts = split_key(key)
    return parts is not None and parts[0] is not None


def _is_known(key: str, known: set[str]) -> bool:
    """Return whether ``key`` is state of a known parameter, or of one of its matrices."""
    parts = split_key(key)
    if parts is None or parts[1] in known:
        return parts is not None
    if "optimizer.matrix_state." not in key:
        return False
    # numbers of a layer, an expert and the matrix follow its name, and a tensor-parallel slab's
    words = SLAB.sub("", parts[1]).split(".")
    while words and words[-1].isdigit():
        words.pop()
        if ".".join(words) in known:
            return True
    return False


def _left_over(keys_there: list[str], asked: set[str], own: set[str]) -> dict[str, bool]:
    """Return the keys that no rank asks for, and of each whether an optimizer has its parameter.

    There are none of optimizers if no rank asks for an optimizer's state.
    """
    known = {parts[1] for key in own if (parts := split_key(key)) is not None}
    any_state = any(split_key(key) is not None for key in own)
    # one flag per key: whether it is asked for, and whether its parameter is known
    asked_for = [key in asked for key in keys_there]
    of_known = [key.rpartition(".")[0] in own or _is_known(key, known) for key in keys_there]
    flags = torch.tensor([[*asked_for, any_state], [*of_known, False]], dtype=torch.int32)
    flags = flags.to(device_of_collectives())
    if distributed.is_initialized():
        distributed.all_reduce(flags, distributed.ReduceOp.MAX)
    wanted, parameter_known = flags.bool().tolist()
    return {
        key: is_known
        for key, is_wanted, is_known in zip(keys_there, wanted, parameter_known, strict=False)
        if not is_wanted and (wanted[-1] or split_key(key) is None)
    }


def _refuse_left_over_state(
    left_over: Mapping[str, bool], fresh: Container[str], folder: Path
) -> None:
    """Log state of parameters that have changed their optimizer; refuse all other state."""
    changed: Counter[str] = Counter()
    refused = []
    for key, parameter_known in left_over.items():
        if (parts := split_key(key)) is None:
            continue
        kind = parts[0] or parts[1].rpartition(".")[2]
        if parameter_known or kind in fresh:
            changed[kind] += 1
        else:
            refused.append(key)
    _log(
        f"checkpoint {folder}: its {kind} is left out ({count} tensors), since the optimizer of "
        "its parameters has changed"
        for kind, count in sorted(changed.items())
    )
    if refused:
        way_out = "Train the same parameters, or name the kinds of state to leave out with "
        way_out += "--checkpoint-fresh-state"
        rule = f"has optimizer state that no optimizer of this run asks for: {_shown(refused)}"
        raise _unfit(folder, rule, way_out)


def _unfit(folder: Path, rule: str, way_out: str) -> CheckpointError:
    return CheckpointError("checkpoint", str(folder), rule, way_out)


def _shown(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
