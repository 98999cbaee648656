"""What a rank stores of one parameter, and where the ranks of its group store the rest.

Note [Shards]
    However weights are stored, an optimizer sees shards: tensor-parallel slabs (a rank's part of a
    tensor-parallel weight), ZeRO-1 fragments of slabs, shards of DTensors, whole parameters. A
    shard has a layout for each logical matrix of the parameter, over the ranks of one group. If
    several ranks hold the same elements, the layout says which of them sends. A shard cannot be
    made unless this rank's pieces of all matrices add up to its tensor. Parameters that are stepped
    element by element need no layouts.

    Shards are made for the model's parameters. Megatron's wrappers then put float32 copies or
    fragments in their place, and set :attr:`ParamShard.main`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import GLOBAL_NAME_ATTRIBUTE
from megatron_eopt.base.place import remat_size, whole_shape
from megatron_eopt.layouts import Layout
from megatron_eopt.layouts.boxes import Boxes
from megatron_eopt.matrices import Split, matrix_columns, matrix_rows, whole
from megatron_eopt.storage.local_tensors import local_of

_ANY_SPLIT = whole((1, 1))  # of parameters that are stepped element by element

_REMEMBERED = 4096  # cached layouts, each for all parameters of one shape and position


@dataclass(frozen=True)
class Ranks:
    """The ranks that together store some parameters, and this rank's index in their group."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "Ranks":
        """Return the ranks of a process group."""
        if group is None or dist.get_world_size(group) == 1:
            # a group of one has nothing to send, so no code below calls a collective
            return cls()
        return cls(group, dist.get_rank(group), dist.get_world_size(group))


@dataclass(eq=False)
class ParamShard:
    """One parameter as a group of ranks stores it; see Note [Shards].

    Raises:
        ConfigurationError: If the pieces that this rank holds do not add up to its tensor.
    """

    name: str  # the parameter's name, unique within an optimizer
    param: Tensor  # the model's parameter
    split: Split = _ANY_SPLIT  # its logical matrices
    layouts: tuple[Layout, ...] = ()  # where each of them is stored, in the split's order
    ranks: Ranks = Ranks()  # the ranks that store it
    shape: tuple[int, ...] = ()  # of this rank's tensor, or any shape with as many elements
    slab: tuple[int, int] | None = None  # tensor-parallel rank and size, if split is one slab's
    padding: int = 0  # elements at the end of this rank's tensor that belong to no matrix
    # the tensor that is stepped: the parameter or what stands for it; None if this rank has nothing
    main: Any = field(init=False)
    start: int = field(init=False, default=0)  # where it begins in the flattened local parameter

    def __post_init__(self) -> None:
        self.main = self.param
        if not self.layouts:
            return
        covered, numel = int(self.pieces.area.sum()), math.prod(self.shape)
        if covered + self.padding != numel:
            rule = (
                f"rank {self.ranks.rank} stores {numel} elements, but the {self.split.kind} "
                f"split {self.split.describe()} covers {covered}"
            )
            hint = "Correct partition_dim, tensor_model_parallel or the split of this parameter"
            raise ConfigurationError("layout", self.name, rule, hint)

    @property
    def stop(self) -> int:
        """One past the last element of the flattened local parameter that :attr:`main` holds."""
        return self.start + int(local_of(self.main).numel())

    def held_of(self, tensor: Tensor) -> Tensor:
        """Return the elements of a tensor like the parameter that :attr:`main` holds, flat."""
        elements: Tensor = local_of(tensor).detach().reshape(-1)[self.start : self.stop]
        return elements

    @property
    def global_name(self) -> str:
        """The parameter's name in the whole model, the same at every layout."""
        return global_name(self.param, self.name)

    @property
    def pieces(self) -> Boxes:
        """What this rank stores of all logical matrices."""
        return _pieces(self.layouts, self.ranks.rank)

    @cached_property
    def matrix_names(self) -> tuple[str, ...]:
        """Names of the logical matrices: the parameter's, and the matrix's if it has several."""
        if len(self.layouts) == 1:
            return (self.name,)
        return tuple(f"{self.name}[{matrix.name}]" for matrix in self.split.matrices)


# by identity of the layouts, which equal parameters share
@lru_cache(maxsize=_REMEMBERED)
def _pieces(layouts: tuple[Layout, ...], rank: int) -> Boxes:
    """Return what a rank stores of all logical matrices."""
    return Boxes.join([layout.piece(rank) for layout in layouts])


def global_name(param: Tensor, name: str) -> str:
    """Return a parameter's name in the whole model, or ``name`` if it is not known."""
    return getattr(param, GLOBAL_NAME_ATTRIBUTE, name)


class Fragment(NamedTuple):
    """The range ``start`` to ``stop`` of a flattened slab; empty if a rank holds nothing.

    ``tensor_rank`` is the tensor-parallel rank of the slab, 0 if nothing is cut.
    """

    tensor_rank: int
    start: int
    stop: int

    def of_rows(self, param: Tensor, number: int) -> "Fragment":
        """Return the same range of the ``number``-th piece of a slab's rows, without its padding.

        A piece, which weight rematerialization has cut off, is like ``param``; see
        :func:`~megatron_eopt.base.place.remat_size`.
        """
        if remat_size(param) == 1:
            return self
        # pieces are equal, and the last ones may consist of padding partly or wholly
        before, end = number * param.numel(), math.prod(whole_shape(param))
        return self._replace(start=min(before + self.start, end), stop=min(before + self.stop, end))


def fragment_layouts(
    split: Split, partition_dim: int, tensor_size: int, fragments: Sequence[Fragment]
) -> tuple[Layout, ...]:
    """Return where each logical matrix of a parameter is stored.

    Tensor parallelism cuts first, then flat ranges of its slabs are taken. Without ZeRO-1, a rank's
    fragment is its whole slab, or its rows of the slab with weight rematerialization. With ZeRO-1
    it is a range of these. Of ranks with equal fragments the first is the source.

    Args:
        split: The parameter's logical matrices.
        partition_dim: Dimension that tensor parallelism cuts; -1 if none, with a size of 1.
        tensor_size: Number of tensor-parallel ranks.
        fragments: One for each rank of the redistribution group, in order.
    """
    # a group may have thousands of ranks, few of which have a part; the others would make long keys
    non_empty = [(rank, item) for rank, item in enumerate(fragments) if item.start < item.stop]
    return _layouts_of(split, partition_dim, tensor_size, tuple(non_empty))


@lru_cache(maxsize=_REMEMBERED)
def _layouts_of(
    split: Split, partition_dim: int, tensor_size: int, non_empty: tuple[tuple[int, Fragment], ...]
) -> tuple[Layout, ...]:
    """Return the layouts for the non-empty fragments, each given with its rank."""
    # laid out as it is stored, one matrix per expert, from which columns are then selected
    if split.transposed:
        experts = _layouts_of(whole(split.shape), partition_dim, tensor_size, non_empty)
        return columns_of(split, experts)
    # ranks with equal fragments hold copies, of which the first rank sends
    holders: dict[Fragment, list[int]] = {}
    for rank, fragment in non_empty:
        holders.setdefault(fragment, []).append(rank)
    ranks = np.array([rank for same in holders.values() for rank in same], np.int64)
    sources = [same[0] for same in holders.values()]
    of_rank = dict(non_empty)
    ranges = np.array([of_rank[rank] for rank in ranks.tolist()], np.int64).reshape(-1, 3)
    # only slabs of which a rank of this group holds a part
    tensor_ranks = np.unique(ranges[:, 0]).tolist()
    rows = [matrix_rows(split, tensor_size, rank, partition_dim) for rank in tensor_ranks]
    layouts = []
    for index, matrix in enumerate(split.matrices):
        # all slabs of the matrix, with the tensor-parallel rank in place of the group's rank
        slabs = [
            Layout.row_runs(
                matrix.shape,
                rank=tensor_rank,
                local=runs[index].local,
                logical=runs[index].logical,
                length=runs[index].length,
                first_col=runs[index].first_col,
                held_cols=runs[index].held_cols,
            ).boxes
            for tensor_rank, runs in zip(tensor_ranks, rows, strict=True)
        ]
        # then each rank of the group takes its flat range of the slab that it has a part of
        cut = Layout(matrix.shape, Boxes.join(slabs)).fragments(
            rank=ranks, holder=ranges[:, 0], start=ranges[:, 1], stop=ranges[:, 2]
        )
        layouts.append(cut.with_sources(sources))
    return tuple(layouts)


def columns_of(split: Split, experts: Sequence[Layout]) -> tuple[Layout, ...]:
    """Return the layouts of a transposed split's matrices, given that of each expert's weight."""
    units = iter(matrix_columns(split))
    layouts = []
    for part in split.parts:
        # units are those of one expert; a part's matrices are ordered by expert, then unit
        part_columns = [next(units) for _ in range(part.count // split.experts)]
        layouts += [expert.select_columns(runs) for expert in experts for runs in part_columns]
    return tuple(layouts)


def box_layouts(split: Split, layout: Layout) -> tuple[Layout, ...]:
    """Return the layouts of a split's matrices, given that of the whole parameter."""
    layouts = []
    for rows in matrix_rows(whole(split.shape) if split.transposed else split):
        # rows are in the order of the weight; the matrix is made in its own
        order = np.argsort(rows.logical, kind="stable")
        layouts.append(layout.select_rows(rows.local[order], rows.length[order]))
    return columns_of(split, layouts) if split.transposed else tuple(layouts)


def group_by_ranks(shards: Iterable[ParamShard]) -> list[list[ParamShard]]:
    """Return the shards of each group of ranks, in order of first appearance."""
    groups: dict[dist.ProcessGroup | None, list[ParamShard]] = {}
    for shard in shards:
        groups.setdefault(shard.ranks.group, []).append(shard)
    return list(groups.values())
