"""What optimizers ask for against what a checkpoint has, agreed over all ranks before it is read.

An optimizer asks for state by requests that can be adapted: to another optimizer's checkpoint, or
to state that may start fresh. Whatever remains unmatched is an error that lists parameters.
"""

import functools
import logging
import operator
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from torch import distributed
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_eopt.base.agreement import (
    CheckpointError,
    agreed,
    any_rank,
    device_of_collectives,
    everyones,
    from_rank_0,
    is_rank_0,
)
from megatron_eopt.base.upstream import needed
from megatron_eopt.checkpoint.contents import Contents, Shapes
from megatron_eopt.checkpoint.keys import saved_keys, split_key
from megatron_eopt.checkpoint.migration import Policy
from megatron_eopt.checkpoint.requests import StateRequests

logger = logging.getLogger(__name__)

_SHOWN = 8


def match(sharded_state_dict: Any, folder: Path, policy: Policy) -> None:
    """Adapt optimizers' requests to the checkpoint that they are about to be loaded from, in place.

    All ranks call this together, and all raise the same error or nothing. ``folder`` holds the
    checkpoint, in the format torch_dist. Whether the model's tensors fit is megatron-core's to say.
    """
    requests = list(_requests(sharded_state_dict))
    if not any_rank(bool(requests)):
        return
    contents = Contents(from_rank_0(lambda: _shapes(folder)))
    policy = functools.reduce(operator.or_, (item.policy for item in requests), policy)
    lines = agreed(lambda: [line for r in requests for line in r.adapt(contents, policy)])
    _log(everyones(lines))
    left_over = _left_over(contents.shapes, saved_keys(sharded_state_dict), requests)
    _refuse_left_over(left_over, policy.fresh, folder)


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


def _log(lines: Iterable[str]) -> None:
    if is_rank_0():
        for line in lines:
            logger.warning("%s", line)


def _left_over(
    shapes: Shapes, asked: set[str], requests: Sequence[StateRequests]
) -> dict[str, bool]:
    """Return the keys of state that no rank asks for, and of each whether it has its parameter.

    Other objects than state of parameters are read or left by rules of their own.
    """
    parts_of = {key: parts for key in sorted(shapes) if (parts := split_key(key)) is not None}
    keys = [key for key, parts in parts_of.items() if shapes[key] is not None or parts.kind]
    known = {parts.parameter for key in asked if (parts := split_key(key)) is not None}
    known = known.union(*(item.known() for item in requests))
    # one flag per key: whether it is asked for, and whether its parameter is known
    asked_for = [key in asked for key in keys]
    of_known = [parts_of[k].parameter in known or k.rpartition(".")[0] in known for k in keys]
    flags = torch.tensor([asked_for, of_known], dtype=torch.int32, device=device_of_collectives())
    if distributed.is_initialized():
        distributed.all_reduce(flags, distributed.ReduceOp.MAX)
    rows = zip(keys, *flags.bool().tolist(), strict=True)
    return {key: is_known for key, is_asked_for, is_known in rows if not is_asked_for}


def _refuse_left_over(left_over: Mapping[str, bool], fresh: Container[str], folder: Path) -> None:
    """Log state of parameters that have changed their optimizer; refuse all other state."""
    changed: Counter[str] = Counter()
    refused = []
    for key, parameter_known in left_over.items():
        parts = split_key(key)
        kind = key.rpartition(".")[2] if parts is None or parts.kind is None else parts.kind
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
        more = f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
        shown = ", ".join(refused[:_SHOWN]) + more
        rule = f"has optimizer state that no optimizer of this run asks for: {shown}"
        way_out = "Train the same parameters, or name the kinds of state to leave out with "
        way_out += "--checkpoint-fresh-state"
        raise _unfit(folder, rule, way_out)


def _unfit(folder: Path, rule: str, way_out: str) -> CheckpointError:
    return CheckpointError("checkpoint", str(folder), rule, way_out)
