"""Finds the parameters in buckets that megatron-core wrote, by their order and their sizes.

Note [Order in buckets]
    megatron-core does not write which parameters its buckets have (``dp_reshardable``). Its rule is
    fixed: a buffer for each chunk and dtype has the trainable parameters in reverse order, each at
    a multiple of 64 elements. So the layout that wrote them follows from the sizes of the buckets:
    the tensor and pipeline parallelism with which the model's parameters fill all of them. Weights
    are compared with the model's after the load. Parameters whose state has names are in none.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.base.place import remat_size
from megatron_eopt.checkpoint.buckets import in_bucket
from megatron_eopt.checkpoint.parameter_space import ParameterSpace, SavedSection, parameter_spaces
from megatron_eopt.checkpoint.sources import Source
from megatron_eopt.layouts.boxes import Box
from megatron_eopt.routing.parameters import cut_dimension

_BUCKET = re.compile(
    r"(?P<chain>(?:chained_\d+\.)?)optimizer\.distributed\.dp_group_idx_(?P<rank>\d+)"
    r"\.gbuf_idx_(?P<buffer>\d+)\.dtype_\((?P<dtype>[^,]+),[^)]*\)\.bucket_idx_(?P<number>\d+)"
)
_ALIGNMENT = 64  # of a parameter's first element, as ``pad_param_start`` of megatron-core has it
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?")


@dataclass(frozen=True)
class Entry:
    """A parameter of the model, without tensor parallelism."""

    name: str
    layer: int | None  # of the decoder
    dtype: str
    shape: tuple[int, ...]
    dim: int  # that tensor parallelism cuts, or -1
    sections: tuple[SavedSection, ...]  # one after another in ``dim``

    def shape_at(self, tp: int) -> tuple[int, ...] | None:
        """Return the shape on a rank; None if tensor parallelism cannot cut it evenly."""
        if self.dim == -1:
            return self.shape
        if any(section.shape[self.dim - len(self.shape)] % tp for section in self.sections):
            return None
        return *self.shape[: self.dim], self.shape[self.dim] // tp, *self.shape[self.dim + 1 :]

    def boxes(self, bucket: str, first: int, tp: int, rank: int) -> Iterator[tuple[str, Source]]:
        """Yield the boxes of the part that a rank has in a bucket, from element ``first`` on."""
        local = self.shape_at(tp)
        assert local is not None
        strides = [math.prod(local[n + 1 :]) for n in range(len(local))]
        for key, shape, offset, _ in self.sections:
            leading = len(shape) - len(local)  # dimensions that index layers and experts
            sizes, begins = list(shape), list(offset)
            if self.dim != -1:
                sizes[leading + self.dim] //= tp
                begins[leading + self.dim] += rank * sizes[leading + self.dim]
            steps = (*[math.prod(local)] * leading, *strides)
            yield key, in_bucket(bucket, first, steps, Box(tuple(begins), tuple(sizes)))
            # parts of a weight that is not cut are one after another in its rows
            axis = leading + max(self.dim, 0)
            first += math.prod(sizes[axis : axis + 1]) * math.prod(steps[axis : axis + 1])


type Chunk = tuple[Entry, ...]
type StageChunks = tuple[Chunk, ...]
type RankOrder = tuple[StageChunks, StageChunks]
"""The parameters of a rank's chunks, in order: dense ones, and those of experts."""


def order_of(model_chunks: Sequence[Any], model_state: Mapping[str, Any]) -> RankOrder:
    """Return the trainable parameters of a rank's chunks, in the order of megatron-core's DDP.

    Nothing for DTensors and under weight rematerialization, which are never saved by bucket.
    """
    chunks = [[p for p in chunk.parameters() if p.requires_grad] for chunk in model_chunks]
    if any(isinstance(p, DTensor) or remat_size(p) > 1 for p in itertools.chain(*chunks)):
        return (), ()
    spaces = parameter_spaces(model_state, dict.fromkeys(itertools.chain(*chunks)))

    def those(*, dense: bool) -> StageChunks:
        return tuple(
            tuple(_entry(spaces[p], p) for p in chunk if getattr(p, "allreduce", True) == dense)
            for chunk in chunks
        )

    return those(dense=True), those(dense=False)


def _entry(space: ParameterSpace, param: Tensor) -> Entry:
    dim, shape, sections = cut_dimension(param), list(param.shape), space.sections(param)
    if dim != -1:
        shape[dim] = sum(section.shape[dim - param.dim()] for section in sections)
    match = _LAYER.match(space.key)
    layer = None if match is None else int(match[1] or (*space.stack_index, 0)[0])
    dtype = torch.uint8 if is_float8tensor(param) else param.dtype  # as in megatron-core's DDP
    return Entry(space.name, layer, str(dtype), tuple(shape), dim, tuple(sections))


def boxes_by_order(
    shapes: Mapping[str, tuple[int, ...] | None],
    orders: Iterable[RankOrder],
    named: Iterable[str],
) -> dict[str, list[Source]]:
    """Return where parameters are in buckets; nothing if they do not fill them exactly.

    Args:
        shapes: Shapes of the checkpoint's tensors.
        orders: The parameters of each rank of the model.
        named: Parameters, or stacks of them, whose state the checkpoint has by name.
    """
    written = _buckets_in(shapes)
    names = {*named}
    boxes: dict[str, dict[Box, Source]] = {}
    for all_stages in zip(*orders, strict=True):
        # in the order of ranks, where nothing else tells
        distinct = dict.fromkeys(_unnamed(stage, names) for stage in all_stages)
        stages = sorted(filter(None, distinct), key=_first_layer)
        for chain, by_rank in written.items():
            fitting = stages and _fit(by_rank, stages)
            if fitting:
                for name, source in fitting:
                    # several model-parallel ranks may have a parameter
                    boxes.setdefault(name, {}).setdefault(source.box, source)
                del written[chain]
                break
        else:
            if stages:
                return {}
    return {} if written else {name: [*by_box.values()] for name, by_box in boxes.items()}


def _unnamed(stage: StageChunks, named: set[str]) -> StageChunks:
    def is_named(entry: Entry) -> bool:
        return bool(named & {entry.name, *(section.key for section in entry.sections)})

    chunks = (tuple(entry for entry in chunk if not is_named(entry)) for chunk in stage)
    return tuple(chunk for chunk in chunks if chunk)


def _first_layer(chunks: Iterable[Chunk]) -> tuple[float, tuple[int, ...]]:
    """Return what stages, and ranks of experts, are sorted by: first layer and offset in stacks."""
    entries = [entry for chunk in chunks for entry in chunk]
    layers = [entry.layer for entry in entries if entry.layer is not None]
    is_first = any("embedding" in section.key for entry in entries for section in entry.sections)
    alone = -1 if is_first else math.inf  # a stage without layers
    return min(layers, default=alone), min(entry.sections[0].offset for entry in entries)


type _Written = dict[int, dict[int, tuple[str, list[tuple[str, int]]]]]
"""By model-parallel rank and buffer: its dtype, and its buckets' names and sizes."""


def _buckets_in(shapes: Mapping[str, tuple[int, ...] | None]) -> dict[str, _Written]:
    """Return the buckets of each optimizer of the chain that wrote them."""
    # all kinds of state have the same buckets
    distinct = {
        (m["chain"], int(m["rank"]), int(m["buffer"]), int(m["number"]), m["dtype"], m[0]): shape[0]
        for key, shape in shapes.items()
        if shape and (m := _BUCKET.match(key))
    }
    written: dict[str, _Written] = {}
    for (chain, rank, buffer, _, dtype, name), size in sorted(distinct.items()):
        buffers = written.setdefault(chain, {}).setdefault(rank, {})
        _, buckets = buffers.setdefault(buffer, (dtype, []))
        buckets.append((name, size))
    return written


def _fit(written: _Written, stages: Sequence[StageChunks]) -> list[tuple[str, Source]] | None:
    """Return the boxes of parameters for the first layout that fills all buckets, or None."""
    for candidate in _candidates(len(written), len(next(iter(written.values()))), stages):
        tp, rest = divmod(len(written), len(candidate))
        if rest:
            continue
        # model-parallel ranks count tensor parallelism first
        by_rank = [
            _in_buffers(written[rank], candidate[rank // tp], tp, rank % tp) for rank in written
        ]
        if all(boxes is not None for boxes in by_rank):
            return [box for boxes in by_rank for box in boxes or ()]
    return None


def _candidates(
    ranks: int, buffers: int, stages: Sequence[StageChunks]
) -> Iterator[Sequence[StageChunks]]:
    """Yield pipelines: this run's, then those whose stages have equally many layers."""
    yield stages
    # interleaved stages have several chunks, in turn
    chunks = sorted((chunk for stage in stages for chunk in stage), key=lambda c: _first_layer([c]))
    once: dict[SavedSection, Entry] = {}  # tied weights where they are first
    for entry in itertools.chain(*chunks):
        once.setdefault(entry.sections[0], entry)
    in_order = [*once.values()]
    layers = {entry.layer for entry in in_order} - {None}
    for pp in (n for n in range(1, ranks + 1) if ranks % n == 0):
        for in_stage in dict.fromkeys((1, buffers)):
            if len(layers) % (pp * in_stage):
                continue
            split = _split(in_order, pp * in_stage, len(layers) // (pp * in_stage))
            yield [tuple(split[stage::pp]) for stage in range(pp)]
            if pp > 1:
                # the last stage has a copy of tied embeddings
                split[-1] = (*split[-1], in_order[0])
                yield [tuple(split[stage::pp]) for stage in range(pp)]


def _split(entries: Sequence[Entry], chunks: int, layers: int) -> list[Chunk]:
    """Split parameters into chunks of equally many layers; others are at either end."""
    split: list[list[Entry]] = [[] for _ in range(chunks)]
    number = 0
    for entry in entries:
        if entry.layer is not None:
            number = entry.layer // layers
        elif any(entry.layer is not None for chunk in split for entry in chunk):
            number = chunks - 1
        split[number].append(entry)
    return [tuple(chunk) for chunk in split]


def _in_buffers(
    written: Mapping[int, tuple[str, list[tuple[str, int]]]], stage: StageChunks, tp: int, rank: int
) -> list[tuple[str, Source]] | None:
    """Return the boxes of a rank's parameters, if they fill its buckets exactly."""
    buffers = [
        (dtype, [entry for entry in reversed(chunk) if entry.dtype == dtype])
        for chunk in stage
        for dtype in dict.fromkeys(entry.dtype for entry in chunk)
    ]
    in_order = [written[buffer] for buffer in sorted(written)]
    if [dtype for dtype, _ in buffers] != [dtype for dtype, _ in in_order]:
        return None
    boxes: list[tuple[str, Source]] = []
    for (_, entries), (_, buckets) in zip(buffers, in_order, strict=True):
        shapes = [entry.shape_at(tp) for entry in entries]
        numels = [math.prod(shape) for shape in shapes if shape is not None]
        starts = len(numels) == len(shapes) and _starts([size for _, size in buckets], numels)
        if not starts:
            return None
        for entry, (number, first) in zip(entries, starts, strict=True):
            boxes += entry.boxes(buckets[number][0], first, tp, rank)
    return boxes


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
