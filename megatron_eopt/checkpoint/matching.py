"""Match the state that optimizers request with a checkpoint, on all ranks, before it is read.

Requests can be adapted to another optimizer's checkpoint, or to state that may start fresh. If
requested state is still missing, an error lists the parameters. State that no optimizer requests,
of parameters that are frozen now or have another optimizer, is ignored.
"""

import functools
import logging
import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import load_common_state_dict
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_eopt.base.agreement import (
    CheckpointError,
    from_rank_0,
    gather_unique,
    raise_together,
)
from megatron_eopt.base.upstream import require_upstream
from megatron_eopt.checkpoint.bucket_order import boxes_by_order
from megatron_eopt.checkpoint.buckets import SavedBuckets, read_buckets
from megatron_eopt.checkpoint.contents import Contents, Shapes
from megatron_eopt.checkpoint.keys import split_key
from megatron_eopt.checkpoint.requests import StateRequests
from megatron_eopt.checkpoint.saved_rows import SavedRows
from megatron_eopt.checkpoint.vocabulary import fill_new_rows
from megatron_eopt.optimizers.continuation import Policy, log_notes
from megatron_eopt.optimizers.saved_groups import Groups, groups_in

logger = logging.getLogger(__name__)


def match(sharded_state_dict: Any, folder: Path, policy: Policy) -> None:
    """Adapt what is requested to the checkpoint in ``folder`` (torch_dist), in place.

    Collective over the world; all ranks raise the same error. megatron-core checks the model's
    tensors.
    """
    requests = list(_requests(sharded_state_dict))
    shapes, groups, buckets, rows = from_rank_0(lambda: _content(folder))
    contents = Contents(shapes)
    if contents.in_buckets and not contents.names_buckets:
        mine = raise_together(lambda: [item.order() for item in requests if item.order])
        orders = gather_unique(mine)
        found = raise_together(lambda: boxes_by_order(shapes, orders, contents.kinds.keys()))
        buckets = replace(buckets, boxes=found)
    # the caller's and each optimizer's own configuration allow differences
    policy = functools.reduce(operator.or_, (item.policy for item in requests), policy)
    notes = raise_together(
        lambda: [note for r in requests for note in r.adapt(shapes, groups, policy, buckets)]
    )
    # a parameter may be on some ranks only
    log_notes(gather_unique(notes))
    raise_together(lambda: rows.find(sharded_state_dict))
    # last, because it replaces entries of the requests by factories
    fill_new_rows(sharded_state_dict, shapes, rows.changes)


def _content(folder: Path) -> tuple[Shapes, Groups, SavedBuckets, SavedRows]:
    """Return a checkpoint's shapes of tensors, parameter groups, buckets, and places of rows."""
    try:
        # the reader that megatron-core uses for the load
        metadata = require_upstream("FileSystemReader")(folder).read_metadata()
        common = load_common_state_dict(folder)
        groups = groups_in(common)
    except Exception as error:
        rule = f"its metadata cannot be read ({type(error).__name__}: {error})"
        hint = "Load another iteration with --ckpt-step, or restore the folder"
        raise CheckpointError("checkpoint", str(folder), rule, hint) from error
    shapes = {
        key: tuple(item.size) if isinstance(item, TensorStorageMetadata) else None
        for key, item in metadata.state_dict_metadata.items()
    }
    cuts = {
        key: tuple(
            len(set(places)) for places in zip(*(c.offsets for c in item.chunks), strict=True)
        )
        for key, item in metadata.state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata) and split_key(key) is None
    }
    rows = SavedRows(shapes, cuts, getattr(common.get("args"), "padded_vocab_size", None))
    return shapes, groups, read_buckets(folder, metadata), rows


def _requests(state: Any) -> Iterator[StateRequests]:
    # megatron-core's nested_values would also descend into the requests
    if isinstance(state, Mapping):
        state = list(state.values())
    if isinstance(state, list | tuple):
        for value in state:
            yield from _requests(value)
    elif isinstance(state, LocalNonpersistentObject) and isinstance(state.obj, StateRequests):
        yield state.obj
