"""Stores momentum in fewer bits between steps.

Note [Rounded momentum]
    A step decodes the momenta of a wave to float32, and encodes their new values. 8-bit values are
    rounded to nearest, because stochastic rounding to so few bits made losses 1 to 2 percent larger
    (docs: parallelism). bfloat16 is rounded stochastically. Its noise is a hash of the parameter's
    name in the whole model, its step count, and the row and column in its logical matrix. So it is
    the same at every parallel layout and after a resume.

    Each block of 32 columns of a row, from column 0 on, shares a scale. Ranks that store parts of
    one block agree on its largest magnitude. A fragment has at most two such blocks, and a slab of
    columns has none if its width is a multiple of 32. Checkpoints store momentum in float32.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base.names import MOMENTUM, MOMENTUM_SCALE, STEP, Int64Array
from megatron_eopt.layouts.boxes import Boxes, ragged_arange
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
from megatron_eopt.storage.shard import ParamShard

ROUNDED_AT_ONCE = 1 << 20
"""Elements rounded at a time, to within a row; each takes about 50 bytes meanwhile."""

type Values = dict[str, Any]
"""State of one parameter."""


class RoundedMomentum:
    """Stores momenta in fewer bits; see Note [Rounded momentum]."""

    def __init__(
        self, dtype: MomentumDtypeT, shards: Sequence[ParamShard], device: torch.device | str
    ) -> None:
        self._format = FORMATS[dtype]
        self._has_scales = self._format.largest is not None
        self._shards = list(shards)
        self._rows = [_Rows(shard, torch.device(device)) for shard in shards]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the index tensors of all shards, which live between steps."""
        return (value for rows in self._rows for value in rows.tensors)

    def make(self, number: int, values: Values, like: Tensor) -> None:
        """Create the momentum of a shard, and its scales, as zeros."""
        dtype, rows = self._format.dtype, self._rows[number]
        values[MOMENTUM] = torch.zeros(like.shape, dtype=dtype, device=like.device)
        if self._has_scales:
            values[MOMENTUM_SCALE] = torch.zeros(rows.blocks, dtype=torch.uint8, device=rows.device)

    def is_kept(self, values: Mapping[str, Any]) -> bool:
        """Whether a state has its momentum in the stored dtype, not in float32 as loaded."""
        return bool(values[MOMENTUM].dtype == self._format.dtype)

    def read(self, number: int, values: Mapping[str, Any]) -> Tensor:
        """Return a shard's momentum in float32; a new tensor, unless it is float32 already."""
        codes: Tensor = values[MOMENTUM]
        if not (self._has_scales and self.is_kept(values)):
            return codes.to(torch.float32)
        rows = self._rows[number]
        # off-loaded momentum may be on the host
        momentum = torch.zeros(codes.shape, dtype=torch.float32, device=codes.device)
        flat, flat_codes = momentum.view(-1), codes.view(-1)
        for elements, _, _, blocks in rows.parts():
            scales = values[MOMENTUM_SCALE][blocks]
            flat[elements] = decoded(flat_codes[elements].to(rows.device), scales)
        return momentum

    def write(
        self,
        numbers: Sequence[int],
        new: Mapping[int, tuple[Values, Tensor]],
        *,
        nearest: bool = False,
    ) -> None:
        """Round new momenta of shards and store them; collective over ranks that share blocks.

        Args:
            numbers: All shards that may have a new momentum on any rank.
            new: State and new float32 momentum of each shard on this rank.
            nearest: Never round stochastically.
        """
        flat = {n: momentum.reshape(-1) for n, (_, momentum) in new.items()}
        scales: dict[int, Tensor] = {}
        if self._has_scales:
            largest = {n: self._rows[n].largest_of(values) for n, values in flat.items()}
            self._reduce_max(numbers, largest)
            scales = {n: scales_for(bits, self._format) for n, bits in largest.items()}
        for n, (values, momentum) in new.items():
            if not self.is_kept(values):
                self.make(n, values, momentum)
            if n in scales:
                values[MOMENTUM_SCALE].copy_(scales[n])
            at_random = not (nearest or self._has_scales)
            # a new key for each step, since with the same noise a small change would be rounded
            # away forever
            key = self._key(n, values[STEP]) if at_random else None
            self._encode(n, flat[n], values[MOMENTUM].view(-1), scales.get(n), key)

    def _key(self, number: int, step: Tensor) -> Tensor:
        name = self._shards[number].global_name
        count = step.to(self._rows[number].device, torch.int64, non_blocking=True)
        # a hash of integers, which is the same on a CPU and a GPU
        return hashed(hashed(count) ^ zlib.crc32(name.encode()))

    def _encode(
        self, number: int, momentum: Tensor, into: Tensor, scales: Tensor | None, key: Tensor | None
    ) -> None:
        rows = self._rows[number]
        row_keys = None if key is None else hashed(rows.row.to(torch.int64) ^ key)
        for elements, runs, columns, blocks in rows.parts():
            block_scales = None if scales is None else scales[blocks]
            noise = NEAREST if row_keys is None else noise_of(row_keys[runs], columns)
            exact = momentum[elements].to(rows.device)
            into[elements] = encoded(exact, self._format, noise, block_scales)

    def _reduce_max(self, numbers: Sequence[int], largest: Mapping[int, Tensor]) -> None:
        """Replace magnitudes of shared blocks by the largest on any rank, as bits; in place."""
        counts = [self._rows[n].shared for n in numbers]
        if not sum(counts):
            return
        # 0 for blocks that this rank has no part of: no magnitude is smaller
        bits = torch.zeros(sum(counts), dtype=torch.int32, device=self._rows[0].device)
        views = dict(zip(numbers, torch.split(bits, counts), strict=True))
        by_shard = [(views[n], self._rows[n], magnitudes) for n, magnitudes in largest.items()]
        for view, rows, magnitudes in by_shard:
            view.scatter_reduce_(0, rows.shared_places, magnitudes[rows.shared_blocks], "amax")
        # as integers, magnitudes are ordered like numbers, and inf and nan are the largest
        dist.all_reduce(bits, dist.ReduceOp.MAX, group=self._shards[0].ranks.group)
        for view, rows, magnitudes in by_shard:
            magnitudes[rows.shared_blocks] = view[rows.shared_places]


class _Rows:
    """A rank's shard as contiguous runs of elements, each within one row; blocks count over runs.

    Attributes:
        row: The row of each run, see :func:`runs_of`; int32 ``(runs,)``.
        blocks: Number of blocks that this rank stores a part of.
        shared: Number of blocks in the group that several ranks store parts of.
        shared_blocks: This rank's shared blocks; int64 ``(n,)``.
        shared_places: The index of each among all shared blocks; int64 ``(n,)``.
    """

    def __init__(self, shard: ParamShard, device: torch.device) -> None:
        per_row = -(-shard.split.cols // BLOCK)
        start, row, column, length = runs_of(shard).T
        low, high = column // BLOCK, (column + length - 1) // BLOCK
        before = np.cumsum(high - low + 1) - (high - low + 1)
        self.blocks = int((high - low + 1).sum())
        # int32, because these live between steps; `parts` makes wider ones for a moment
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
        # the same on all ranks, as it is the size of an all-reduce
        self.shared = len(shared) if shard.ranks.size > 1 else 0
        # only the first and the last block of a run can be shared
        names = np.concatenate([row * per_row + low, row * per_row + high])
        is_shared = np.isin(names, shared)
        local = np.concatenate([before, before + high - low])
        self.shared_blocks, self.shared_places = (
            torch.tensor(values, dtype=torch.int64, device=device)
            for values in (local[is_shared], np.searchsorted(shared, names[is_shared]))
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of this object."""
        of_runs = [self.row, self._length, self._column, self._block]
        return [*of_runs, self.shared_blocks, self.shared_places]

    def parts(self) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield slices of elements, and the run, column and block of each element; int64."""
        for runs, elements in self._parts:
            count = elements.stop - elements.start
            numbers = torch.arange(runs.start, runs.stop, device=self.device)
            # given the size, torch need not wait for the device to sum the lengths
            of_each = numbers.repeat_interleave(self._length[runs], output_size=count)
            columns = torch.arange(elements.start, elements.stop, device=self.device)
            columns += self._column[of_each]
            yield elements, of_each, columns, columns // BLOCK + self._block[of_each]

    def largest_of(self, flat: Tensor) -> Tensor:
        """Return the largest magnitude of each block as bits; int32 ``(blocks,)``."""
        largest = torch.zeros(self.blocks, dtype=torch.int32, device=self.device)
        for elements, _, _, blocks in self.parts():
            bits = magnitude_bits(flat[elements].to(self.device))
            largest.scatter_reduce_(0, blocks, bits, "amax")
        return largest


def _cut_blocks(boxes: Boxes, above: int, cols: int) -> Int64Array:
    """Return the blocks that an edge of a box cuts, numbered row by row; int64."""
    left = boxes.take(boxes.column % BLOCK != 0)
    ends = boxes.column + boxes.width
    # the last block of a row is short, not cut, if the box ends with the row
    right = boxes.take((ends % BLOCK != 0) & (ends != cols))
    blocks = []
    for cut, block in ((left, left.column), (right, right.column + right.width - 1)):
        rows = np.repeat(cut.row + above, cut.height) + ragged_arange(cut.height)
        blocks.append(rows * -(-cols // BLOCK) + np.repeat(block // BLOCK, cut.height))
    return np.concatenate(blocks)


def _parts(start: Int64Array, length: Int64Array) -> Iterator[tuple[slice, slice]]:
    """Yield slices of runs, and of their elements, for about ``ROUNDED_AT_ONCE`` elements each."""
    # a run is not divided, so a part may be longer by one run
    at_once = start // ROUNDED_AT_ONCE
    bounds = [*np.flatnonzero(np.diff(at_once, prepend=-1)).tolist(), len(start)]
    for first, end in pairwise(bounds):
        last = end - 1
        yield slice(first, end), slice(int(start[first]), int(start[last] + length[last]))
