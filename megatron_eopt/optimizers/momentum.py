"""Momentum that is kept in fewer bits between steps.

Note [Rounded momentum]
    A step decodes the momenta of a wave to float32, and encodes what they have become. 8-bit ones
    are rounded to the nearest number: noise of so few bits, twice the variance, made losses 1 to 2
    percent larger (docs: parallelism). bfloat16 is rounded at random, with noise that is a hash
    of the parameter's name in the whole model, its count of steps, and the row and column of its
    logical matrices. So it is the same however the parameter is stored, and in a run that goes on
    from a checkpoint.

    Blocks that share a scale are 32 columns of a row, from column 0 on. Where the parts of several
    ranks meet inside of blocks, these ranks agree on the largest magnitudes there: a fragment has
    two such blocks at most, and a slab of columns none if its width divides by 32. In a checkpoint
    momentum is float32, whatever it is kept in.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base.names import MOMENTUM, MOMENTUM_SCALE, STEP
from megatron_eopt.layouts.boxes import Boxes, Int64Array, ragged_arange
from megatron_eopt.math.low_precision import (
    BLOCK,
    FORMATS,
    NEAREST,
    MomentumDtypeT,
    decoded,
    encoded,
    hashed,
    magnitude_bits,
    noise_of,
    scales_for,
)
from megatron_eopt.optimizers.stored_matrices import runs_of
from megatron_eopt.storage.shard import Shard

ROUNDED_AT_ONCE = 1 << 20
"""Elements, give or take a row: rounding them takes some 50 bytes each."""

type Values = dict[str, Any]
"""State of one parameter."""


class RoundedMomentum:
    """Keeps momenta in fewer bits; see Note [Rounded momentum]."""

    def __init__(
        self, dtype: MomentumDtypeT, shards: Sequence[Shard], device: torch.device | str
    ) -> None:
        self._format = FORMATS[dtype]
        self._has_scales = self._format.largest is not None
        self._shards = list(shards)
        self._rows = [_Rows(shard, torch.device(device)) for shard in shards]

    def tensors(self) -> Iterator[Tensor]:
        """Yield where blocks and rows of all shards are."""
        return (value for rows in self._rows for value in rows.tensors)

    def make(self, number: int, values: Values, like: Tensor) -> None:
        """Let the state of a shard have a momentum of zeros, and scales."""
        dtype, rows = self._format.dtype, self._rows[number]
        values[MOMENTUM] = torch.zeros(like.shape, dtype=dtype, device=like.device)
        if self._has_scales:
            values[MOMENTUM_SCALE] = torch.zeros(rows.blocks, dtype=torch.uint8, device=rows.device)

    def is_kept(self, values: Mapping[str, Any]) -> bool:
        """Whether a state has its momentum as it is kept, and not as it was loaded."""
        return bool(values[MOMENTUM].dtype == self._format.dtype)

    def read(self, number: int, values: Mapping[str, Any]) -> Tensor:
        """Return a shard's momentum in float32: a new tensor, unless that is what there is."""
        codes: Tensor = values[MOMENTUM]
        if not (self._has_scales and self.is_kept(values)):
            return codes.to(torch.float32)
        rows = self._rows[number]
        # what is off-loaded stays on the host between steps
        momentum = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        flat, kept = momentum.view(-1), codes.view(-1)
        for elements, _, _, blocks in rows.parts():
            scales = values[MOMENTUM_SCALE][blocks]
            flat[elements] = decoded(kept[elements].to(rows.device), scales)
        return momentum

    def write(
        self,
        numbers: Sequence[int],
        new: Mapping[int, tuple[Values, Tensor]],
        *,
        nearest: bool = False,
    ) -> None:
        """Round new momenta of shards, and keep them in their states.

        ``numbers`` are all shards that may have a new one on any rank, and ranks that share blocks
        call this together. With ``nearest`` nothing is rounded at random.
        """
        flat = {n: momentum.reshape(-1) for n, (_, momentum) in new.items()}
        scales: dict[int, Tensor] = {}
        if self._has_scales:
            largest = {n: self._rows[n].largest_of(values) for n, values in flat.items()}
            self._agree(numbers, largest)
            scales = {n: scales_for(bits, self._format) for n, bits in largest.items()}
        for n, (values, momentum) in new.items():
            if not self.is_kept(values):
                self.make(n, values, momentum)
            if n in scales:
                values[MOMENTUM_SCALE].copy_(scales[n])
            at_random = not (nearest or self._has_scales)
            key = self._key(n, values[STEP]) if at_random else None
            self._encode(n, flat[n], values[MOMENTUM].view(-1), scales.get(n), key)

    def _key(self, number: int, step: Tensor) -> Tensor:
        shard = self._shards[number]
        name = shard.global_name or shard.name
        count = step.to(self._rows[number].device, torch.int64, non_blocking=True)
        return hashed(hashed(count) ^ zlib.crc32(name.encode()))

    def _encode(
        self, number: int, momentum: Tensor, into: Tensor, scales: Tensor | None, key: Tensor | None
    ) -> None:
        rows = self._rows[number]
        row_keys = None if key is None else hashed(rows.row.to(torch.int64) ^ key)
        for elements, runs, columns, blocks in rows.parts():
            mine = None if scales is None else scales[blocks]
            noise = NEAREST if row_keys is None else noise_of(row_keys[runs], columns)
            exact = momentum[elements].to(rows.device)
            into[elements] = encoded(exact, self._format, noise, mine)

    def _agree(self, numbers: Sequence[int], largest: Mapping[int, Tensor]) -> None:
        """Let the parts of a block have the largest magnitude of all of it, as bits; in place."""
        counts = [self._rows[n].shared for n in numbers]
        if not sum(counts):
            return
        bits = torch.zeros(sum(counts), dtype=torch.int32, device=self._rows[0].device)
        views = dict(zip(numbers, torch.split(bits, counts), strict=True))
        found = [(views[n], self._rows[n], its) for n, its in largest.items()]
        for view, rows, its in found:
            view.scatter_reduce_(0, rows.shared_places, its[rows.shared_blocks], "amax")
        dist.all_reduce(bits, dist.ReduceOp.MAX, group=self._shards[0].ranks.group)
        for view, rows, its in found:
            its[rows.shared_blocks] = view[rows.shared_places]


class _Rows:
    """What a rank stores of a shard: runs without gaps, each inside one row of one matrix.

    Blocks are counted over the runs.

    Attributes:
        row: The row of each run, see :func:`runs_of`; int32 ``(runs,)``.
        blocks: Number of blocks of which this rank has a part.
        shared: Number of blocks, on all ranks, of which several ranks have a part each.
        shared_blocks: Those of this rank; int64 ``(n,)``.
        shared_places: The number of each among all shared ones; int64 ``(n,)``.
    """

    def __init__(self, shard: Shard, device: torch.device) -> None:
        per_row = -(-shard.split.cols // BLOCK)
        start, row, column, length = runs_of(shard).T
        low, high = column // BLOCK, (column + length - 1) // BLOCK
        before = np.cumsum(high - low + 1) - (high - low + 1)
        self.blocks = int((high - low + 1).sum())
        self.row, self._length, self._column, self._block = (
            torch.tensor(values, dtype=torch.int32, device=device)
            for values in (row, length, column - start, before - low)
        )
        self.device = self.row.device
        self._parts = list(_parts(start, length))
        above, cut = 0, []
        for layout in shard.layouts:
            cut.append(_cut_blocks(layout.boxes, above, shard.split.cols))
            above += layout.shape[0]
        shared = np.unique(np.concatenate(cut))
        self.shared = len(shared) if shard.ranks.size > 1 else 0
        # only the first and the last block of a run can be cut
        names = np.concatenate([row * per_row + low, row * per_row + high])
        mine = np.isin(names, shared)
        local = np.concatenate([before, before + high - low])
        self.shared_blocks, self.shared_places = (
            torch.tensor(values, dtype=torch.int64, device=device)
            for values in (local[mine], np.searchsorted(shared, names[mine]))
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All that it keeps."""
        of_runs = [self.row, self._length, self._column, self._block]
        return [*of_runs, self.shared_blocks, self.shared_places]

    def parts(self) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield which elements some are, and the run, column and block of each of them; int64."""
        for runs, elements in self._parts:
            count = elements.stop - elements.start
            numbers = torch.arange(runs.start, runs.stop, device=self.device)
            of_each = numbers.repeat_interleave(self._length[runs], output_size=count)
            columns = torch.arange(elements.start, elements.stop, device=self.device)
            columns += self._column[of_each]
            yield elements, of_each, columns, columns // BLOCK + self._block[of_each]

    def largest_of(self, flat: Tensor) -> Tensor:
        """Return the largest magnitude of each block as bits; int32 ``(blocks,)``."""
        found = torch.zeros(self.blocks, dtype=torch.int32, device=self.device)
        for elements, _, _, blocks in self.parts():
            bits = magnitude_bits(flat[elements].to(self.device))
            found.scatter_reduce_(0, blocks, bits, "amax")
        return found


def _cut_blocks(boxes: Boxes, above: int, cols: int) -> Int64Array:
    """Return the blocks that a box ends inside of, numbered row by row."""
    left = boxes.take(boxes.column % BLOCK != 0)
    ends = boxes.column + boxes.width
    right = boxes.take((ends % BLOCK != 0) & (ends != cols))
    found = []
    for some, block in ((left, left.column), (right, right.column + right.width - 1)):
        rows = np.repeat(some.row + above, some.height) + ragged_arange(some.height)
        found.append(rows * -(-cols // BLOCK) + np.repeat(block // BLOCK, some.height))
    return np.concatenate(found)


def _parts(start: Int64Array, length: Int64Array) -> Iterator[tuple[slice, slice]]:
    """Yield some runs, and their elements."""
    at_once = start // ROUNDED_AT_ONCE
    bounds = [*np.flatnonzero(np.diff(at_once, prepend=-1)).tolist(), len(start)]
    for first, end in pairwise(bounds):
        last = end - 1
        yield slice(first, end), slice(int(start[first]), int(start[last] + length[last]))
