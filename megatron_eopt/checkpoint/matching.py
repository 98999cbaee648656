"""Match the state that optimizers request with a checkpoint, on all ranks, before it is read.

State that no optimizer requests, of parameters that are frozen now or are not in the model, is left
out.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

from megatron_eopt.base.agreement import CheckpointError, from_rank_0, gather_unique, raise_together
from megatron_eopt.checkpoint.catalogue import Catalogue, read_catalogue
from megatron_eopt.checkpoint.keys import split_key
from megatron_eopt.checkpoint.requests import StateRequests
from megatron_eopt.checkpoint.vocabulary import fill_new_rows
from megatron_eopt.state.rule import kinds_by_optimizer, log_lines

_NORMS = ("layernorm.", "layer_norm_weight")
_ROW_PARALLEL = ("linear_proj.weight", "linear_fc2.weight", "out_proj.weight")
"""Each transformer or Mamba layer has these."""


def match(sharded_state_dict: Any, folder: Path) -> None:
    """Adapt what is requested to the checkpoint in ``folder`` (torch_dist), in place.

    Collective over the world; all ranks raise the same error.
    """
    requests = list(_requests(sharded_state_dict))
    catalogue = from_rank_0(lambda: read_catalogue(folder))
    raise_together(lambda: _refuse_other_model(sharded_state_dict, catalogue))
    own = kinds_by_optimizer(gather_unique(pair for item in requests for pair in item.kinds()))
    reports = raise_together(lambda: [item.adapt(catalogue, own) for item in requests])
    # a rank may have none of the parameters that the checkpoint has
    found = bool(gather_unique(True for report in reports if report.found))

    def refuse() -> None:
        for item, report in zip(requests, reports, strict=True):
            report.refuse("checkpoint", has_stepped=item.has_stepped, found=found)

    raise_together(refuse)
    # a parameter may be on some ranks only
    lines = gather_unique(line for report in reports for line in report.lines)
    if requests:
        lines += [
            ("is left out: no optimizer of this run steps it", name)
            for name in sorted(catalogue.state.keys() - _names_of(requests))
        ]
    log_lines(lines)
    # last, because it replaces entries of the requests by factories
    fill_new_rows(sharded_state_dict, catalogue.shapes)


def _requests(state: Any) -> Iterator[StateRequests]:
    # megatron-core's nested_values would also descend into the requests
    if isinstance(state, Mapping):
        state = list(state.values())
    if isinstance(state, list | tuple):
        for value in state:
            yield from _requests(value)
    elif isinstance(state, LocalNonpersistentObject) and isinstance(state.obj, StateRequests):
        yield state.obj


def _names_of(requests: Sequence[StateRequests]) -> set[str]:
    return {name for item in requests for names in item.members.values() for name in names}


def _refuse_other_model(state: Any, catalogue: Catalogue) -> None:
    """Raise a CheckpointError if the checkpoint's model has other shapes, or other rows.

    megatron-core saves the rows of all ranks of weight rematerialization one after another, with
    the padding of each. With other sizes, it would read other rows, or padding.
    """
    of_model = [item for item in nested_values(state) if isinstance(item, ShardedTensor)]
    of_model = [item for item in of_model if split_key(item.key) is None]
    ours = {item.key: item.axis_fragmentations or () for item in of_model}
    theirs = {k: v.cuts for k, v in catalogue.values.items() if v.kind is None and v.cuts}
    for is_expert in (False, True):
        sizes, before = _sizes_of(ours, is_expert), _sizes_of(theirs, is_expert)
        if sizes and before and sizes != before and max(sizes[0], before[0]) > 1:
            rule = (
                f"was written with weight rematerialization over {before[0]} ranks and tensor "
                f"parallelism over {before[1]}, and this run has {sizes[0]} and {sizes[1]}"
            )
            hint = "Load it with the sizes of the run that wrote it"
            raise CheckpointError("checkpoint", "the rows of its weights", rule, hint)
    for item in of_model:
        shape = catalogue.shapes.get(item.key)
        if shape not in (None, tuple(item.global_shape)) and not item.allow_shape_mismatch:
            rule = f"has shape {shape} there, and {tuple(item.global_shape)} in this model"
            hint = "Load a checkpoint of this model, or build the model that wrote it"
            raise CheckpointError("checkpoint", item.key, rule, hint)


def _sizes_of(cuts: Mapping[str, Sequence[int]], is_expert: bool) -> tuple[int, int] | None:
    """Return sizes of rematerialization and tensor parallelism, which cut rows and columns.

    None if no weight tells it.
    """
    # only FSDP cuts norms, and it saves rows in their order
    norms = [sizes for key, sizes in cuts.items() if any(name in key for name in _NORMS)]
    if any(size > 1 for sizes in norms for size in sizes[-1:]):
        return None
    found = [
        tuple(sizes[-2:])
        for key, sizes in cuts.items()
        if key.endswith(_ROW_PARALLEL) and (".experts." in key) == is_expert and len(sizes) > 1
    ]
    return (max(rows for rows, _ in found), max(cols for _, cols in found)) if found else None
