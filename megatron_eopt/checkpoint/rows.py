"""Where the rows of a weight are, if tensor parallelism and weight rematerialization cut them.

megatron-core saves the rows of all ranks one after another, with the padding of each slab, and
halves gate and up as if each rank had a part of both. So the place of a row in a checkpoint depends
on the sizes of tensor parallelism and of rematerialization.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor

from megatron_eopt.base.names import Int64Array
from megatron_eopt.base.place import remat_size, whole_shape


class RowGrid(NamedTuple):
    """How the rows of a weight are cut: into slabs, and each slab, after padding, into pieces."""

    slabs: int
    pieces: int
    height: int  # rows of a piece

    @property
    def rows(self) -> int:
        """Number of rows, with padding."""
        return self.slabs * self.pieces * self.height


class LocalRows:
    """This rank's rows of a weight.

    Args:
        param: The parameter, whose attributes say how it is cut.
        parts: Its entries as megatron-core makes them, one for each section: gate and up, or all.
    """

    def __init__(self, param: Tensor, parts: Sequence[ShardedTensor]) -> None:
        first, pieces = parts[0], remat_size(param)
        self.parts = parts
        self.axis = first.prepend_axis_num
        self.per_key = sum(part.key == first.key for part in parts)  # sections in one tensor
        # megatron-core numbers pieces as if all ranks' rows were one after another in the tensor
        number = first.global_offset[self.axis] // first.local_shape[0]
        slabs = first.axis_fragmentations[self.axis] // (pieces * self.per_key)
        self.slab, self.piece = divmod(number, pieces)
        self.grid = RowGrid(slabs, pieces, param.shape[0])
        self.count = slabs * whole_shape(param)[0]  # rows of the whole weight, without padding

    def numbers(self) -> Int64Array:
        """Return which rows of the whole weight this rank has, without padding."""
        section = self.count // len(self.parts)  # rows of gate or up
        share = section // self.grid.slabs  # rows of it in each slab
        begin = self.piece * self.grid.height
        end = min(begin + self.grid.height, share * len(self.parts))
        which, within = np.divmod(np.arange(begin, end), share)
        numbers: Int64Array = which * section + self.slab * share + within
        return numbers

    def runs_in(self, grid: RowGrid, count: int, data: Tensor) -> list[ShardedTensor]:
        """Return runs of the rows as parts of tensors that are cut like ``grid``.

        Args:
            grid: How the tensors are cut.
            count: Number of the weight's rows there. Further rows are copies of the last one.
            data: This rank's rows.
        """
        sections = len(self.parts)
        share = count // sections // grid.slabs
        which, within = np.divmod(np.minimum(self.numbers(), count - 1), count // sections)
        slab, within = np.divmod(within, share)
        piece, within = np.divmod(which * share + within, grid.height)
        section, within = np.divmod(within, grid.height // sections)
        row = (slab * grid.pieces + piece) * (grid.height // sections) + within
        ends = 1 + np.flatnonzero((np.diff(row) != 1) | (np.diff(section) != 0))
        # a rank with nothing but padding takes part with no rows
        bounds = [0, *ends.tolist(), len(row)]
        section, row = (np.append(values, 0) for values in (section, row))
        return [
            self._run(data[low:high], int(section[low]), int(row[low]), grid)
            for low, high in pairwise(bounds)
        ]

    def _run(self, data: Tensor, section: int, row: int, grid: RowGrid) -> ShardedTensor:
        part, height = self.parts[section], grid.rows // len(self.parts)
        shape, offset = list(part.global_shape), list(part.global_offset)
        shape[self.axis] = self.per_key * height
        offset[self.axis] = section % self.per_key * height + row
        return replace(
            part,
            data=data,
            local_shape=tuple(data.shape),
            global_shape=tuple(shape),
            global_offset=tuple(offset),
            axis_fragmentations=None,
        )


def param_of(data: Tensor) -> Tensor:
    """Return the parameter that the data of a model's entry belongs to."""
    param: Tensor = getattr(data, "_gtp_dequant_src", data)
    return param


def with_plain_data[T: (ShardedTensor, ShardedTensorFactory)](item: T) -> T:
    """Return an entry with data without memory if it is an 8-bit weight, which has no views."""
    if not is_float8tensor(item.data):
        return item
    return replace(item, data=torch.empty(item.data.shape, dtype=item.data.dtype, device="meta"))
