"""State that megatron-core's Adam has saved by bucket (``dp_reshardable``).

Note [Order in buckets]
    Each bucket of DDP's buffers is a flat tensor of many parameters of one model-parallel rank, for
    each kind of state. megatron-core does not write which parameters these are. Its rule is fixed:
    a buffer for each chunk and dtype has the trainable parameters in reverse order, each at a
    multiple of 64 elements. So a rank of the same model-parallel layout, with any number of
    data-parallel ranks, finds its parameters by their sizes.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor

from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.checkpoint.catalogue import Catalogue
from megatron_eopt.checkpoint.parameter_space import parameter_spaces
from megatron_eopt.checkpoint.sources import Boxes, Source
from megatron_eopt.layouts.boxes import Box

_ALIGNMENT = 64  # of a parameter's first element, as ``pad_param_start`` of megatron-core has it

_BUCKET = re.compile(
    r"(?P<chain>(?:chained_\d+\.)?)optimizer\.distributed\.dp_group_idx_(?P<rank>\d+)"
    r"\.gbuf_idx_(?P<buffer>\d+)\.dtype_\((?P<dtype>[^,]+),[^)]*\)\.bucket_idx_(?P<number>\d+)"
)


def boxes_in_buckets(
    catalogue: Catalogue,
    model_chunks: Sequence[Any],
    model_state: Mapping[str, Any],
    ranks: Mapping[bool, int],
) -> Boxes:
    """Return where this rank's parameters are in a checkpoint's buckets, without a kind of state.

    Args:
        catalogue: What the checkpoint has. Parameters whose state it names are in no bucket.
        model_chunks: The rank's model chunks.
        model_state: The model's ``sharded_state_dict``.
        ranks: Number of the model-parallel rank, without (False) and with expert parallelism.

    Raises:
        CheckpointError: If the parameters do not fill the buckets exactly.
    """
    written = _buckets_in(catalogue)
    if not written:
        return {}
    trained = [[p for p in chunk.parameters() if p.requires_grad] for chunk in model_chunks]
    spaces = parameter_spaces(model_state, dict.fromkeys(itertools.chain(*trained)))
    named = catalogue.state.keys()
    boxes: dict[str, list[Source]] = {}
    for is_expert, rank in ranks.items():
        params = [
            [
                p
                for p in chunk
                if getattr(p, "allreduce", True) != is_expert
                and named.isdisjoint((spaces[p].name, *spaces[p].keys))
            ]
            for chunk in trained
        ]
        if not any(params):
            continue
        of_rank = (chain for chain in written if rank in written[chain])
        fitting = ((c, f) for c in of_rank if (f := _fit(params, written[c][rank])) is not None)
        chain, found = next(fitting, ("", None))
        if found is None:
            rule = (
                "this form of Adam's state, written without megatron-eopt, names no parameters, "
                "and those of this rank do not fill its buckets"
            )
            hint = (
                "Load it at the tensor, pipeline and expert parallelism that wrote it, and save "
                "once. That checkpoint loads at any layout"
            )
            raise CheckpointError("checkpoint", "dp_reshardable", rule, hint)
        del written[chain]
        for param, (bucket, start) in found.items():
            for piece, shape, offset, first, strides in spaces[param].boxes(0, param.numel()):
                source = Source(bucket, (), Box(offset, shape), (start + first,), strides)
                boxes.setdefault(piece.key, []).append(source)
    return boxes


type _Buffers = dict[int, tuple[str, list[tuple[str, int]]]]
"""By the number of a buffer: its dtype, and the names and sizes of its buckets."""


def _buckets_in(catalogue: Catalogue) -> dict[str, dict[int, _Buffers]]:
    """Return the buffers of each optimizer of the chain that wrote them, by model-parallel rank."""
    # all kinds of state have the same buckets
    distinct = {
        (m["chain"], int(m["rank"]), int(m["buffer"]), int(m["number"]), m["dtype"], m[0]): shape[0]
        for key, shape in catalogue.shapes.items()
        if shape and (m := _BUCKET.match(key))
    }
    written: dict[str, dict[int, _Buffers]] = {}
    for (chain, rank, buffer, _, dtype, name), size in sorted(distinct.items()):
        buffers = written.setdefault(chain, {}).setdefault(rank, {})
        buffers.setdefault(buffer, (dtype, []))[1].append((name, size))
    return written


def _fit(
    chunks: Sequence[Sequence[Tensor]], buffers: _Buffers
) -> dict[Tensor, tuple[str, int]] | None:
    """Return bucket and first element of each parameter, if all fill the buffers exactly."""
    wanted = []
    for chunk in chunks:
        # 8-bit weights are in a buffer of bytes
        dtype_of = {p: torch.uint8 if is_float8tensor(p) else p.dtype for p in reversed(chunk)}
        for dtype in dict.fromkeys(reversed(dtype_of.values())):
            wanted.append((str(dtype), [p for p in dtype_of if dtype_of[p] == dtype]))
    if [dtype for dtype, _ in wanted] != [buffers[number][0] for number in sorted(buffers)]:
        return None
    found: dict[Tensor, tuple[str, int]] = {}
    for (_, params), number in zip(wanted, sorted(buffers), strict=True):
        buckets = buffers[number][1]
        starts = _starts([size for _, size in buckets], [p.numel() for p in params])
        if starts is None:
            return None
        for param, (bucket, first) in zip(params, starts, strict=True):
            found[param] = (buckets[bucket][0], first)
    return found


def _starts(buckets: Sequence[int], numels: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return bucket and first element of each parameter, if they fill the buckets exactly."""
    starts: list[tuple[int, int]] = []
    number = end = 0

    def aligned(index: int) -> int:
        return -(-index // _ALIGNMENT) * _ALIGNMENT

    for numel in numels:
        if aligned(end) + numel > buckets[number]:
            # before shared embeddings, a bucket is filled up
            if buckets[number] not in (end, aligned(end)) or number + 1 == len(buckets):
                return None
            number, end = number + 1, 0
        starts.append((number, aligned(end)))
        end = aligned(end) + numel
    is_full = number + 1 == len(buckets) and buckets[number] in (end, aligned(end))
    return starts if is_full else None
