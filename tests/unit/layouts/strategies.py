"""Random layouts of one matrix, and all ranks of a redistribution in one process."""

import numpy as np
import torch
from hypothesis import strategies as st

from megatron_eopt.layouts import Layout, Matrix, build_plan
from megatron_eopt.layouts.redistribution import run_copies


def check(layout, ranks):
    """Paint the matrix: one source for every element, and no rank has any twice."""
    sources, held = np.zeros(layout.shape, int), np.zeros((ranks, *layout.shape), int)
    for rank, row, column, height, width, *_, source, _, _ in layout.boxes.table.tolist():
        place = slice(row, row + height), slice(column, column + width)
        assert sources[place].shape == (height, width)
        sources[place] += source
        held[rank][place] += 1
    assert (sources == 1).all()
    assert held.max() == 1


@st.composite
def sizes(draw, total, parts):
    """Sizes of ``parts`` parts with the given sum, some of them possibly empty."""
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=parts - 1, max_size=parts - 1)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


@st.composite
def slabs(draw, shape, ranks):
    """A cut over some ranks, every slab at one or more of them."""
    order = draw(st.permutations(range(ranks)))
    parts = draw(st.integers(1, ranks))
    holders = [[order[i]] for i in range(parts)]
    for rank in order[parts:]:
        if draw(st.booleans()):
            holders[draw(st.integers(0, parts - 1))].append(rank)
    dim = draw(st.sampled_from([0, 1]))
    return Layout.slabs(shape, dim, holders, draw(sizes(shape[dim], parts)))


@st.composite
def stored(draw, shape, ranks):
    """A storage layout: slabs, a part of a fused weight, fragments of either."""
    if draw(st.booleans()):
        # the matrix is a set of row runs of a larger one, in storage order
        gaps = draw(st.lists(st.integers(0, 2), min_size=3, max_size=3))
        counts = draw(sizes(shape[0], 3))
        starts, at = [], 0
        for gap, count in zip(gaps, counts, strict=True):
            starts.append(at + gap)
            at += gap + count
        layout = draw(slabs((at + 1, shape[1]), ranks)).select_rows(starts, counts)
    else:
        layout = draw(slabs(shape, ranks))
    if draw(st.booleans()):
        return layout
    # flat fragments of every coordinate's storage, dealt to ranks of a larger group in turn
    coordinates = sorted(set(layout.boxes.rank.tolist()))
    table = []
    for coordinate in coordinates:
        extent = int(layout.piece(coordinate).extent.max())
        at = 0
        for part, size in enumerate(draw(sizes(extent, 2))):
            table.append((coordinate + part * ranks, coordinate, at, at + size))
            at += size
    rank, holder, start, stop = np.array(table).T
    return layout.fragments(rank, holder, start, stop)


def computed(shape, ranks):
    """A compute layout: whole at one owner or at several ranks, or cut."""
    owners = st.integers(0, ranks - 1)
    return slabs(shape, ranks) | owners.map(lambda owner: Layout.whole(shape, owner))


def full_matrix(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def store(layout, full, ranks, copies_differ=False):
    """The storage tensor of every rank; NaN where it holds something else.

    With ``copies_differ`` the copies that are no source hold other numbers.
    """
    tensors = []
    for rank in range(ranks):
        piece = layout.piece(rank)
        tensor = torch.full([int(piece.extent.max(initial=0))], torch.nan)
        for _, row, col, height, width, offset, stride, source, *_ in piece.table.tolist():
            view = tensor.as_strided((height, width), (stride, 1), offset)
            view.copy_(full[row : row + height, col : col + width])
            if copies_differ and not source:
                view.add_(1000)
        tensors.append(tensor)
    return tensors


def exchange(plans, direction, wave, sources, sinks):
    """Run one direction of one wave for all ranks, passing slices where the wire would."""
    parts = [getattr(plan.waves[wave], direction) for plan in plans]
    sent = []
    for part, tensors in zip(parts, sources, strict=True):
        buffer = torch.empty(sum(part.send_sizes))
        run_copies(part.pack, tensors, [buffer])
        sent.append(buffer.split(part.send_sizes))
    for rank, part in enumerate(parts):
        run_copies(part.keep, sources[rank], sinks[rank])
        buffer = torch.cat([slices[rank] for slices in sent])
        assert part.recv_sizes == tuple(len(slices[rank]) for slices in sent)
        run_copies(part.unpack, [buffer], sinks[rank])


def simulate(matrix: Matrix, ranks: int, tensors, function):
    """Run the redistribution of one matrix on all ranks of one process.

    Returns:
        Every rank's compute piece as it arrived, and every rank's output tensor.
    """
    plans = [build_plan([matrix], [[0]], rank=r, world_size=ranks) for r in range(ranks)]
    assert len({plan.digest for plan in plans}) == 1
    assert len({plan.calls for plan in plans}) == 1
    assert sum(plan.bytes_sent for plan in plans) == sum(plan.bytes_received for plan in plans)
    stacks = [torch.full([plan.waves[0].compute_elements], torch.nan) for plan in plans]
    exchange(plans, "inward", 0, [[t] for t in tensors], [[s] for s in stacks])
    pieces = []
    for rank, (plan, stack) in enumerate(zip(plans, stacks, strict=True)):
        shape = matrix.compute.local_shape(rank)
        assert (shape is None) == (not plan.waves[0].batches)
        pieces.append(None if shape is None else stack[: shape[0] * shape[1]].view(shape).clone())
    for stack in stacks:
        stack.copy_(function(stack))
    outputs = [torch.full_like(t, torch.nan) for t in tensors]
    exchange(plans, "outward", 0, [[s] for s in stacks], [[o] for o in outputs])
    return plans, pieces, outputs
