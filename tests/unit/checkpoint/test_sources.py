"""A piece is read from every form in which a checkpoint may have its tensor, element by element."""

import math
import random
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor, nn

from megatron_eopt.checkpoint.parameter_space import parameter_spaces
from megatron_eopt.checkpoint.sources import Source, assemble
from megatron_eopt.layouts.boxes import Box
from megatron_eopt.matrices import gated

Saved = dict[str, Tensor]
Form = tuple[Saved, list[Source]]


def in_one(whole: Tensor, _: random.Random) -> Form:
    return {"whole": whole}, [Source("whole", tuple(whole.shape), box_of(whole), (0, 0))]


def in_two(whole: Tensor, rng: random.Random) -> Form:
    """Cut rows or columns into two tensors."""
    dim = rng.randrange(2)
    cut = rng.randint(1, whole.shape[dim] - 1)
    parts = whole.split([cut, whole.shape[dim] - cut], dim)
    starts = (0, 0), (cut * (dim == 0), cut * dim)
    boxes = [Box(at, tuple(part.shape)) for at, part in zip(starts, parts, strict=True)]
    sources = [Source(str(n), box.shape, box, (0, 0)) for n, box in enumerate(boxes)]
    return {str(n): part.contiguous() for n, part in enumerate(parts)}, sources


def in_a_stack(whole: Tensor, rng: random.Random) -> Form:
    """As one layer of several."""
    layers, its = rng.randint(2, 4), rng.randrange(2)
    stack = torch.full((layers, *whole.shape), math.nan)
    stack[its] = whole
    return {"stack": stack}, [Source("stack", tuple(stack.shape), box_of(whole), (its, 0, 0))]


def in_a_bucket(whole: Tensor, rng: random.Random) -> Form:
    """Flat, between other parameters, by rows or by columns."""
    rows, cols = whole.shape
    strides = rng.choice([(cols, 1), (1, rows)])
    start = rng.randint(0, 5)
    bucket = torch.full((start + rows * cols + rng.randint(0, 3),), math.nan)
    bucket.as_strided(whole.shape, strides, start).copy_(whole)
    source = Source("bucket", tuple(bucket.shape), box_of(whole), (start,), strides)
    return {"bucket": bucket}, [source]


def with_a_repeated_row(whole: Tensor, rng: random.Random) -> Form:
    known = rng.randint(1, whole.shape[0] - 1)
    whole[known:] = whole[known - 1]
    shape = (known, whole.shape[1])
    new = Box((known, 0), (whole.shape[0] - known, shape[1]))
    sources = [Source("rows", shape, Box((0, 0), shape), (0, 0))]
    sources.append(Source("rows", shape, new, (known - 1, 0), repeats=True))
    return {"rows": whole[:known].clone()}, sources


FORMS = (in_one, in_two, in_a_stack, in_a_bucket, with_a_repeated_row)


def box_of(tensor: Tensor) -> Box:
    return Box((0,) * tensor.dim(), tuple(tensor.shape))


def piece_of(whole: Tensor, rng: random.Random) -> tuple[ShardedTensor, Tensor]:
    """Return a random part that a run asks for, some of which are transposed in memory."""
    sides = [sorted(rng.sample(range(size + 1), 2)) for size in whole.shape]
    expected = whole[tuple(slice(*side) for side in sides)]
    data = torch.empty_like(expected, memory_format=torch.contiguous_format)
    if rng.random() < 0.3:
        data = torch.empty(data.T.shape).T
    offset = tuple(first for first, _ in sides)
    shapes = tuple(data.shape), tuple(whole.shape)
    return ShardedTensor("asked", data, data.dtype, *shapes, offset, None), expected


def read(asked: Any, saved: Saved) -> Tensor:
    """Load as megatron-core does."""
    if isinstance(asked, ShardedTensorFactory):
        parts = asked.build()
        return asked.merge_fn({key: read(part, saved) for key, part in parts.items()})
    found = saved[asked.key]
    assert asked.global_shape == tuple(found.shape)
    assert asked.local_shape == tuple(asked.data.shape)
    ends = zip(asked.global_offset, asked.local_shape, strict=True)
    asked.data.copy_(found[tuple(slice(at, at + size) for at, size in ends)])
    return asked.data


@pytest.mark.parametrize("form", FORMS)
def test_every_element_is_read_from_its_place(form):
    for seed in range(60):
        rng = random.Random(seed)
        rows, cols = rng.choices(range(2, 7), k=2)
        saved, sources = form(whole := torch.arange(1.0, 1 + rows * cols).view(rows, cols), rng)
        piece, expected = piece_of(whole, rng)
        data = piece.data
        read(assemble(piece, sources), saved)
        assert torch.equal(data, expected), seed
        last = Box(piece.global_offset, piece.local_shape).clip(sources[-1].box)
        assert (assemble(piece, sources[:-1]) is None) == (last is not None), seed


def test_what_is_in_order_needs_no_other_memory():
    whole = torch.arange(12.0).view(3, 4)
    rows = ShardedTensor("asked", torch.empty(1, 4), whole.dtype, (1, 4), (3, 4), (1, 0), None)
    for form in (in_one, in_a_stack, in_a_bucket):
        saved, sources = form(whole.clone(), random.Random(1))
        asked = assemble(rows, sources)
        assert isinstance(asked, ShardedTensor), form
        assert read(asked, saved).data_ptr() == rows.data.data_ptr()


@pytest.mark.parametrize("lead", [(), (1,)], ids=len)
def test_a_whole_tensor_is_read_from_its_matrices(lead):
    """State of matrices under keys of their own, each of which is a part of the parameter's."""
    offset, size = (*lead, 3, 0), (*lead, 2, 4)
    part = Source("whole", (*lead, 5, 4), Box((0, 0), (2, 4)), offset)
    assert part.turned("matrix", (2, 4)) == Source("matrix", (2, 4), Box(offset, size), (0, 0))


def test_matrices_are_read_from_the_tensor_of_their_weight():
    """Of a gated weight on the second of two ranks, which have a half of gate and of up each."""
    saved, weight = torch.arange(48.0).view(12, 4), nn.Parameter(torch.zeros(6, 4))
    weight.tensor_model_parallel, weight.partition_dim = True, 0
    halves = zip(weight.chunk(2), (1, 3), strict=True)
    state = {at: ShardedTensor.from_rank_offsets("w", half, (0, at, 4)) for half, at in halves}
    parts = list(parameter_spaces(state, [weight])[weight].matrices(weight, gated((12, 4))))
    for number, expected in enumerate(saved.chunk(2)):
        data = torch.empty(6, 4)
        asked = ShardedTensor("m", data, data.dtype, (6, 4), (6, 4), (0, 0), None)
        of_matrix = [part.source for part in parts if part.matrix == (number, 2)]
        read(assemble(asked, of_matrix), {"w": saved})
        assert torch.equal(data, expected)
