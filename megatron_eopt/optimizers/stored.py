"""How the ranks of one group store a parameter whose logical matrices are to be orthogonalized."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_eopt.layouts import Layout
from megatron_eopt.layouts.boxes import Boxes
from megatron_eopt.matrices import Split, matrix_rows

__all__ = ["Fragment", "PlacedParameter", "Stored", "StoredParameter", "storage_layouts"]


@dataclass(frozen=True, slots=True)
class Fragment:
    """What one rank of the group holds of a parameter.

    Attributes:
        tp_rank: The rank's tensor-parallel coordinate, 0 where nothing is cut.
        start: First element held, counted in the flattened tensor-parallel-local weight.
        stop: One past the last element held; equal to ``start`` where the rank holds nothing.
    """

    tp_rank: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """One parameter as a group of ranks stores it: tensor parallelism first, then flat fragments.

    A plain tensor-parallel weight has one whole-slab fragment a rank, a ZeRO-1 weight a range of
    its slab, a replica the same range as another rank.

    Attributes:
        name: The parameter's name, for messages; unique in its group.
        split: Its logical matrices; ``whole(shape)`` if it is one.
        partition_dim: Dimension cut by tensor parallelism, -1 if none.
        tp_size: Ranks of the tensor-parallel group, 1 if nothing is cut.
        fragments: One entry per rank of the group, in the group's order of ranks.
    """

    name: str
    split: Split
    partition_dim: int
    tp_size: int
    fragments: tuple[Fragment, ...]


@dataclass(frozen=True, slots=True)
class PlacedParameter:
    """One parameter whose layouts are known already, for instance from a DTensor's placements.

    Attributes:
        name: The parameter's name, for messages; unique in its group.
        split: Its logical matrices.
        layouts: Where each of them is stored, in the split's order.
    """

    name: str
    split: Split
    layouts: tuple[Layout, ...]


type Stored = StoredParameter | PlacedParameter
"""How a group stores a parameter."""


def storage_layouts(parameter: Stored) -> list[Layout]:
    """Return the storage layout of every logical matrix of a parameter, over its group.

    Of ranks that hold the same range the first is the source.
    """
    if isinstance(parameter, PlacedParameter):
        return list(parameter.layouts)
    holders: dict[Fragment, list[int]] = {}
    for rank, fragment in enumerate(parameter.fragments):
        if fragment.start < fragment.stop:
            holders.setdefault(fragment, []).append(rank)
    ranks = [rank for group in holders.values() for rank in group]
    sources = [group[0] for group in holders.values()]
    tp_ranks = sorted({parameter.fragments[rank].tp_rank for rank in ranks})
    held = [
        matrix_rows(parameter.split, parameter.tp_size, tp_rank, parameter.partition_dim)
        for tp_rank in tp_ranks
    ]
    layouts = []
    for index, matrix in enumerate(parameter.split.matrices):
        slabs = [
            Layout.row_runs(
                matrix.shape,
                rank=tp_rank,
                local=runs[index].local,
                logical=runs[index].logical,
                length=runs[index].length,
                first_col=runs[index].first_col,
                held_cols=runs[index].held_cols,
            ).boxes
            for tp_rank, runs in zip(tp_ranks, held, strict=True)
        ]
        whole = Layout(matrix.shape, Boxes.join(slabs))
        layouts.append(_cut(whole, parameter, ranks).with_sources(sources))
    return layouts


def _cut(layout: Layout, parameter: StoredParameter, ranks: Sequence[int]) -> Layout:
    """Cut a layout over tensor-parallel coordinates into the fragments of ``ranks``."""
    fragments = [parameter.fragments[rank] for rank in ranks]
    return layout.fragments(
        rank=np.array(ranks, np.int64),
        holder=np.array([fragment.tp_rank for fragment in fragments], np.int64),
        start=np.array([fragment.start for fragment in fragments], np.int64),
        stop=np.array([fragment.stop for fragment in fragments], np.int64),
    )
