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

from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

from megatron_eopt.base.agreement import from_rank_0, gather_unique, raise_together
from megatron_eopt.checkpoint.bucket_order import boxes_by_order
from megatron_eopt.checkpoint.catalogue import read_catalogue
from megatron_eopt.checkpoint.continuation import Policy, log_notes
from megatron_eopt.checkpoint.requests import StateRequests
from megatron_eopt.checkpoint.saved_rows import SavedRows
from megatron_eopt.checkpoint.vocabulary import fill_new_rows

logger = logging.getLogger(__name__)


def match(sharded_state_dict: Any, folder: Path, policy: Policy) -> None:
    """Adapt what is requested to the checkpoint in ``folder`` (torch_dist), in place.

    Collective over the world; all ranks raise the same error. megatron-core checks the model's
    tensors.
    """
    requests = list(_requests(sharded_state_dict))
    catalogue = from_rank_0(lambda: read_catalogue(folder))
    if catalogue.in_buckets and not catalogue.bucket_boxes:
        orders = gather_unique(
            raise_together(lambda: [item.order() for item in requests if item.order])
        )
        ours = gather_unique(name for item in requests for name in item.bucket_names)
        # earlier versions saved a hash of names, which is the same at this layout only
        if not catalogue.bucket_names or catalogue.bucket_names.issuperset(ours):
            named = catalogue.state.keys()
            boxes = raise_together(lambda: boxes_by_order(catalogue.shapes, orders, named))
            catalogue = replace(catalogue, bucket_boxes=boxes)
    # the caller's and each optimizer's own configuration allow differences
    policy = functools.reduce(operator.or_, (item.policy for item in requests), policy)
    notes = raise_together(lambda: [note for r in requests for note in r.adapt(catalogue, policy)])
    # a parameter may be on some ranks only
    log_notes(gather_unique(notes))
    rows = SavedRows(catalogue)
    raise_together(lambda: rows.find(sharded_state_dict))
    # last, because it replaces entries of the requests by factories
    fill_new_rows(sharded_state_dict, catalogue.shapes, rows.changes)


def _requests(state: Any) -> Iterator[StateRequests]:
    # megatron-core's nested_values would also descend into the requests
    if isinstance(state, Mapping):
        state = list(state.values())
    if isinstance(state, list | tuple):
        for value in state:
            yield from _requests(value)
    elif isinstance(state, LocalNonpersistentObject) and isinstance(state.obj, StateRequests):
        yield state.obj
