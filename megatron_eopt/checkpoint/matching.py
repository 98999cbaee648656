"""What optimizers ask for against what a checkpoint has, agreed over all ranks before it is read.

An optimizer asks for state by requests that can be adapted: to another optimizer's checkpoint, or
to state that may start fresh. What remains unmatched is an error that lists parameters. State that
no optimizer asks for, of parameters that are frozen now or have another optimizer, is left out.
"""

import functools
import logging
import operator
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.utils import log_single_rank
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_eopt.base.agreement import (
    CheckpointError,
    agreed,
    any_rank,
    everyones,
    from_rank_0,
)
from megatron_eopt.base.upstream import needed
from megatron_eopt.checkpoint.contents import Contents, Shapes
from megatron_eopt.checkpoint.migration import Policy
from megatron_eopt.checkpoint.requests import StateRequests

logger = logging.getLogger(__name__)


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
    for line in everyones(lines):
        log_single_rank(logger, logging.WARNING, f"optimizer state: {line}")


def _shapes(folder: Path) -> Shapes:
    try:
        # whatever megatron-core is going to read the checkpoint with
        metadata = needed("FileSystemReader")(folder).read_metadata().state_dict_metadata
    except Exception as error:
        rule = f"its metadata cannot be read ({type(error).__name__}: {error})"
        way_out = "Load another iteration with --ckpt-step, or restore the folder"
        raise CheckpointError("checkpoint", str(folder), rule, way_out) from error
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
