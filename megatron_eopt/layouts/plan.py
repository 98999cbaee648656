"""Plans: all waves of a redistribution as pure data, computed alike on every rank."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.layouts.boxes import Boxes, Int64Array
from megatron_eopt.layouts.coverage import check_cover
from megatron_eopt.layouts.exchange import Exchange, Side, build_exchange
from megatron_eopt.layouts.layout import Layout

# Local matrices of other shapes begin at multiples of this many elements: 256 bytes in float32.
_ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class Matrix:
    """One logical matrix on its way."""

    name: str  # for messages and tables; unique
    storage: Layout  # where it is stored between steps
    compute: Layout  # where it is computed on; every piece dense (:meth:`Layout.compact`)
    # Name of the storage tensor that its storage layout refers to; by default its own name. Logical
    # matrices of one fused parameter share it.
    tensor: str = ""
    returns: bool = True  # whether what is computed travels back to the storage

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
    """One wave as one rank sees it."""

    matrices: tuple[int, ...]  # indices of the wave's matrices, on whatever rank
    # names of the storage tensors of which this rank holds something in this wave
    tensors: tuple[str, ...]
    results: tuple[str, ...]  # those of them that something travels back to
    batches: tuple[Batch, ...]  # what this rank computes
    compute_elements: int  # size of its compute buffer
    inward: Exchange  # storage to compute layout
    outward: Exchange  # compute to storage layout


@dataclass(frozen=True, slots=True)
class Plan:
    """A redistribution as one rank of a group sees it."""

    rank: int
    world_size: int  # ranks of the group
    element_size: int  # bytes of an element on the wire
    names: tuple[str, ...]  # of the matrices
    # storage tensor name to (index used by the moves, elements it must have at least)
    tensors: dict[str, tuple[int, int]]
    waves: tuple[WavePlan, ...]  # the waves, in order
    digest: str  # hash of everything the plan was computed from; equal on ranks that agree

    @property
    def storage_tensors(self) -> int:
        """One more than the largest index of a storage tensor that is held here."""
        return 1 + max((index for index, _ in self.tensors.values()), default=-1)

    @property
    def calls(self) -> int:
        """Collective calls of one run, the same on every rank."""
        return sum(w.inward.collective + w.outward.collective for w in self.waves)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends to others in one run."""
        sent = sum(sum(w.inward.send_sizes) + sum(w.outward.send_sizes) for w in self.waves)
        return sent * self.element_size

    @property
    def bytes_received(self) -> int:
        """Bytes that this rank receives from others in one run."""
        got = sum(sum(w.inward.recv_sizes) + sum(w.outward.recv_sizes) for w in self.waves)
        return got * self.element_size


def build_plan(
    matrices: Sequence[Matrix],
    waves: Sequence[Sequence[int]],
    *,
    rank: int,
    world_size: int,
    element_size: int = 4,
) -> Plan:
    """Compute a plan; a pure function that every rank calls with the same lists.

    Only the copies of ``rank`` are materialised. ``element_size`` is in bytes, on the wire.

    Raises:
        ConfigurationError: If a layout has gaps or overlaps, a compute piece is not dense, names
            repeat, or ``waves`` are no partition of the indices of ``matrices``.
    """
    names = tuple(matrix.name for matrix in matrices)
    _check_lists(names, waves)
    index: dict[str, int] = {}
    tensor = np.array([index.setdefault(m.stored_in, len(index)) for m in matrices], np.int64)
    storage = _stack([m.storage for m in matrices])
    compute = _stack([m.compute for m in matrices])
    shapes = [matrix.storage.shape for matrix in matrices]
    for which, sides in (("storage", storage), ("compute", compute)):
        labels = [f"{name} ({which})" for name in names]
        check_cover(labels, shapes, *sides, world_size)
    plans = [_plan_wave(matrices, list(wave), tensor, rank, world_size) for wave in waves]
    return Plan(
        rank=rank,
        world_size=world_size,
        element_size=element_size,
        names=names,
        tensors=_local_tensors(index, tensor, *storage, rank),
        waves=tuple(plans),
        digest=_digest(matrices, waves, storage, compute, (world_size, element_size)),
    )


def _check_lists(names: Sequence[str], waves: Sequence[Sequence[int]]) -> None:
    if len(set(names)) != len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ConfigurationError("matrices", twice, "must have unique names", "Rename one of them")
    listed = sorted(i for wave in waves for i in wave)
    if listed != list(range(len(names))):
        odd = sorted(set(listed) ^ set(range(len(names)))) or listed
        rule = f"must hold every index below {len(names)} exactly once"
        raise ConfigurationError("waves", odd[:8], rule, "Use layouts.plan_waves")


def _stack(layouts: Sequence[Layout]) -> tuple[Int64Array, Boxes]:
    """Lay layouts below one another; returns the matrix of every box, and the boxes."""
    counts = np.array([len(layout.boxes) for layout in layouts], np.int64)
    matrix = np.repeat(np.arange(len(layouts), dtype=np.int64), counts)
    return matrix, Boxes.join([layout.boxes for layout in layouts])


def _local_tensors(
    index: dict[str, int], tensor: Int64Array, matrix: Int64Array, boxes: Boxes, rank: int
) -> dict[str, tuple[int, int]]:
    here = boxes.rank == rank
    needed = np.zeros(len(index), np.int64)
    np.maximum.at(needed, tensor[matrix[here]], boxes.take(here).extent)
    return {name: (i, int(needed[i])) for name, i in index.items() if needed[i]}


def _plan_wave(
    matrices: Sequence[Matrix], wave: list[int], tensor: Int64Array, rank: int, world_size: int
) -> WavePlan:
    computed = {i: shape for i in wave if (shape := matrices[i].compute.local_shape(rank))}
    batches, elements = _make_batches(computed)
    place = {
        i: batch.offset + n * batch.shape[0] * batch.shape[1]
        for batch in batches
        for n, i in enumerate(batch.matrices)
    }
    zero = np.zeros(len(wave), np.int64)
    storage = Side(*_stack([matrices[i].storage for i in wave]), tensor[wave], zero)
    base = np.array([place.get(i, 0) for i in wave], np.int64)
    compute = Side(*_stack([matrices[i].compute for i in wave]), zero, base)
    held = [i for i in wave if len(matrices[i].storage.piece(rank))]
    back = np.array([matrices[i].returns for i in wave], bool)
    return WavePlan(
        matrices=tuple(wave),
        tensors=tuple(dict.fromkeys(matrices[i].stored_in for i in held)),
        results=tuple(dict.fromkeys(matrices[i].stored_in for i in held if matrices[i].returns)),
        batches=batches,
        compute_elements=elements,
        inward=build_exchange(storage, compute, rank, world_size),
        outward=build_exchange(compute.only(back), storage.only(back), rank, world_size),
    )


def _make_batches(shapes: dict[int, tuple[int, int]]) -> tuple[tuple[Batch, ...], int]:
    """Group equal shapes; returns the batches and the elements of the compute buffer."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i, shape in shapes.items():
        groups.setdefault(shape, []).append(i)
    batches = []
    offset = 0
    for shape, members in groups.items():
        batches.append(Batch(shape, offset, tuple(members)))
        size = shape[0] * shape[1] * len(members)
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return tuple(batches), offset


def _digest(
    matrices: Sequence[Matrix],
    waves: Sequence[Sequence[int]],
    storage: tuple[Int64Array, Boxes],
    compute: tuple[Int64Array, Boxes],
    numbers: tuple[int, ...],
) -> str:
    shapes = [(m.name, m.stored_in, m.returns, m.storage.shape, m.compute.shape) for m in matrices]
    text = repr((shapes, [list(map(int, wave)) for wave in waves], numbers))
    digest = hashlib.blake2b(text.encode(), digest_size=32)
    for matrix, boxes in (storage, compute):
        digest.update(np.ascontiguousarray(matrix).tobytes())
        digest.update(np.ascontiguousarray(boxes.table).tobytes())
    return digest.hexdigest()
