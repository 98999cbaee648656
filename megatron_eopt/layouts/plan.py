"""Plans: all waves of a redistribution as plain data, which each rank computes for itself."""

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import Int64Array
from megatron_eopt.layouts.assignment import first_uses
from megatron_eopt.layouts.boxes import MATRIX, OFFSET, TENSOR, Boxes, weights_of
from megatron_eopt.layouts.exchange import Copy, Exchange, build_exchange
from megatron_eopt.layouts.layout import Layout

_ALIGNMENT = 64  # batches begin at multiples of this many elements: 256 bytes in float32


@dataclass(frozen=True, eq=False)
class Matrix:
    """A logical matrix to redistribute."""

    name: str  # unique; for messages and tables
    storage: Layout  # where it is stored between steps
    compute: Layout  # where it is computed, with dense pieces (:meth:`Layout.compact`)
    tensor: str = ""  # storage tensor, shared within a fused parameter; default: ``name``
    returns: bool = True  # whether the result travels back to the storage
    kind: Hashable = None  # matrices of different kinds are never stacked together

    @property
    def stored_in(self) -> str:
        """Name of the storage tensor."""
        return self.tensor or self.name


@dataclass(frozen=True, slots=True)
class Batch:
    """Local matrices of equal shape, one after another in a rank's compute buffer."""

    shape: tuple[int, int]  # local rows and columns of each
    offset: int  # first element in the wave's compute buffer
    matrices: tuple[int, ...]  # indices into the plan's matrices


@dataclass(frozen=True, slots=True)
class WavePlan:
    """One wave on one rank."""

    tensors: tuple[str, ...]  # storage tensors with matrices of this wave on this rank
    results: tuple[str, ...]  # those of them that receive results
    batches: tuple[Batch, ...]  # what this rank computes
    compute_elements: int  # size of its compute buffer
    inward: Exchange  # storage to compute layout
    outward: Exchange  # compute to storage layout


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """A redistribution on one rank of a group."""

    rank: int
    element_size: int  # bytes per element that is sent
    tensors: dict[str, tuple[int, int]]  # by name: (index in copies, least number of elements)
    # for each wave, this rank's storage tensors that no earlier wave needs on any rank; all ranks
    # that share a tensor load it for the same wave, so loading may be collective
    loads: tuple[tuple[str, ...], ...]
    waves: tuple[WavePlan, ...]
    digest: str  # hash of everything the plan was computed from; equal on ranks that agree

    @property
    def calls(self) -> int:
        """Collective calls per run, the same on every rank."""
        return sum(w.inward.collective + w.outward.collective for w in self.waves)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends to other ranks per run."""
        sent = sum(sum(w.inward.send_sizes) + sum(w.outward.send_sizes) for w in self.waves)
        return sent * self.element_size

    @property
    def bytes_received(self) -> int:
        """Bytes that this rank receives from other ranks per run."""
        got = sum(sum(w.inward.recv_sizes) + sum(w.outward.recv_sizes) for w in self.waves)
        return got * self.element_size


def build_plan(
    matrices: Sequence[Matrix],
    waves: Sequence[Sequence[int]],
    *,
    rank: int,
    world_size: int,
    element_size: int = 4,
) -> ExchangePlan:
    """Compute the plan of one rank; a pure function that every rank calls with the same lists.

    Only copies of ``rank`` are computed. ``element_size`` is the number of bytes per element sent.

    Raises:
        ConfigurationError: If a layout has gaps or overlaps.
    """
    names = [matrix.name for matrix in matrices]
    index: dict[str, int] = {}
    tensor = np.array([index.setdefault(m.stored_in, len(index)) for m in matrices], np.int64)
    # all ranks' boxes in two tables, so that one pass checks and hashes thousands of matrices
    storage = _stack([m.storage for m in matrices], tensor)
    compute = _stack([m.compute for m in matrices], 0)
    shapes = [matrix.storage.shape for matrix in matrices]
    for which, boxes in (("storage", storage), ("compute", compute)):
        _check_cover([f"{name} ({which})" for name in names], shapes, boxes)
    own_boxes = storage.take(storage.rank == rank)
    needed = np.zeros(len(index), np.int64)
    np.maximum.at(needed, own_boxes.tensor, own_boxes.extent)
    told = [
        (m.name, m.stored_in, m.returns, m.kind, m.storage.shape, m.compute.shape) for m in matrices
    ]
    # Ranks compare this instead of their lists, which can have megabytes. If it is equal, so are
    # all split sizes, and no all-to-all can hang or mix up elements.
    text = repr((told, [list(map(int, wave)) for wave in waves], world_size, element_size))
    digest = hashlib.blake2b(text.encode(), digest_size=32)
    digest.update(storage.table.tobytes())
    digest.update(compute.table.tobytes())
    # from the matrices of all ranks, not only this one's, so that ranks load a tensor in the same
    # wave and `load` may communicate
    fresh = first_uses([matrices[i].stored_in for i in wave] for wave in waves)
    return ExchangePlan(
        rank=rank,
        element_size=element_size,
        tensors={name: (i, int(needed[i])) for name, i in index.items() if needed[i]},
        loads=tuple(tuple(name for name in names if needed[index[name]]) for names in fresh),
        waves=tuple(_plan_wave(matrices, wave, tensor, rank, world_size) for wave in waves),
        digest=digest.hexdigest(),
    )


def _check_cover(names: Sequence[str], shapes: Sequence[tuple[int, int]], boxes: Boxes) -> None:
    """Raise unless the sources of each matrix hold every element once, all of them inside it."""
    sides = np.array(shapes, np.int64).reshape(-1, 2)
    rows, cols = sides.T
    inside = (boxes.row >= 0) & (boxes.bottom <= rows[boxes.matrix])
    inside &= (boxes.column >= 0) & (boxes.right <= cols[boxes.matrix])
    sources = boxes.take(inside & (boxes.source == 1))
    covered = np.zeros(len(names), np.uint64)
    np.add.at(covered, sources.matrix, sources.weights)
    wrong = covered != weights_of(np.zeros_like(sides), sides)
    # what is outside was left out of the sum, which may be right by itself
    wrong[boxes.matrix[~inside]] = True
    if wrong.any():
        bad = int(wrong.argmax())
        rule = f"must hold each element of the {shapes[bad]} matrix once"
        raise ConfigurationError("layout", names[bad], rule, "Give every element one source rank")


def _stack(layouts: Sequence[Layout], tensor: Int64Array | int) -> Boxes:
    """Concatenate layouts; ``tensor`` is the index of each layout's storage tensor."""
    boxes = Boxes.join([layout.boxes for layout in layouts])
    counts = [len(layout.boxes) for layout in layouts]
    matrix = np.repeat(np.arange(len(layouts), dtype=np.int64), counts)
    tensors = np.broadcast_to(tensor, len(layouts))
    return boxes.replace(MATRIX, matrix).replace(TENSOR, tensors[matrix])


def _plan_wave(
    matrices: Sequence[Matrix], wave: Sequence[int], tensor: Int64Array, rank: int, world_size: int
) -> WavePlan:
    members = [matrices[i] for i in wave]
    # equal parameters share one layout object
    shape_of = cache(lambda layout: layout.local_shape(rank))
    is_stored = cache(lambda layout: len(layout.piece(rank)) > 0)
    batches, places, elements = _make_batches(
        {
            i: (shape, matrices[i].kind)
            for i in wave
            if (shape := shape_of(matrices[i].compute)) is not None
        }
    )
    storage = _stack([m.storage for m in members], tensor[list(wave)])
    compute = _stack([m.compute for m in members], 0)
    # Compute layouts begin at 0. On this rank, each matrix is at its place in the wave's stack.
    # Offsets of other ranks are never read here, so 0 is as good as any.
    base = np.array([places.get(i, 0) for i in wave], np.int64)
    compute = compute.replace(OFFSET, compute.offset + base[compute.matrix])
    stored = [m for m in members if is_stored(m.storage)]
    # such as gradients of SOAP: they travel to owners, but no result returns in their place
    back = np.array([m.returns for m in members], bool)
    returned, results = compute.take(back[compute.matrix]), storage.take(back[storage.matrix])
    return WavePlan(
        tensors=tuple(dict.fromkeys(m.stored_in for m in stored)),
        results=tuple(dict.fromkeys(m.stored_in for m in stored if m.returns)),
        batches=batches,
        compute_elements=elements,
        inward=build_exchange(storage, compute, rank, world_size),
        outward=build_exchange(returned, results, rank, world_size),
    )


def _make_batches(
    shapes: dict[int, tuple[tuple[int, int], Hashable]],
) -> tuple[tuple[Batch, ...], dict[int, int], int]:
    """Group equal shapes and kinds; return batches, offsets in the buffer, and its size."""
    groups: dict[tuple[tuple[int, int], Hashable], list[int]] = {}
    for i, alike in shapes.items():
        groups.setdefault(alike, []).append(i)
    batches = []
    places: dict[int, int] = {}
    offset = 0
    for ((rows, cols), _), members in groups.items():
        batches.append(Batch((rows, cols), offset, tuple(members)))
        size = rows * cols
        places.update({i: offset + n * size for n, i in enumerate(members)})
        offset += -(-size * len(members) // _ALIGNMENT) * _ALIGNMENT
    return tuple(batches), places, offset


def places_of(plan: ExchangePlan) -> dict[str, tuple[int, int, int]]:
    """Return the tensors that are copied unchanged to one run of a wave's stack and back.

    Values are the wave, the first element in its stack, and the number of elements.
    """
    places = {}
    for number, wave in enumerate(plan.waves):
        inward, outward = wave.inward, wave.outward
        moved = {copy.source for copy in inward.pack} | {copy.sink for copy in outward.unpack}
        fresh = set(plan.loads[number])
        ways: dict[int, list[Copy]] = defaultdict(list)
        for copy in inward.keep:
            ways[copy.source].append(copy)
        for copy in outward.keep:
            ways[copy.sink].append(copy)
        for name in wave.tensors:
            index, size = plan.tensors[name]
            start = ways[index][0].write[-1] if ways[index] else 0
            # all its elements in one copy to the stack, and in one copy from the same run back
            there = Copy(index, 0, (size,), (1, 0), (1, start))
            again = Copy(0, index, (size,), (1, start), (1, 0))
            # not one that an earlier wave has loaded, whose memory is elsewhere by now
            if name in fresh and index not in moved and ways[index] == [there, again]:
                places[name] = (number, start, size)
    return places
