"""Slabs: the parts of a parameter that tensor parallelism and rematerialization cut from it."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base.agreement import gather_objects, group_of_members
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import TpModeT
from megatron_eopt.base.place import whole_shape
from megatron_eopt.matrices import Split
from megatron_eopt.routing.parameters import cut_dimension
from megatron_eopt.storage.shard import Fragment, ParamShard, Ranks, fragment_layouts

type SplitOf = Callable[[Tensor, tuple[int, ...]], Split]
"""Returns the logical matrices of a parameter, given its unsharded shape."""


def partition_dim_and_group(
    param: Tensor, pg_collection: Any, mode: TpModeT = "blockwise"
) -> tuple[int, dist.ProcessGroup | None]:
    """Return the dimension in which tensor parallelism cuts a parameter, and the group.

    Returns ``(-1, None)`` if nothing is cut. Parameters with ``allreduce = False`` or ``expert_tp``
    belong to experts and use the group ``expt_tp`` instead of ``tp``.

    Raises:
        ConfigurationError: If the parameter is cut and the group is missing.
    """
    dim = cut_dimension(param)
    if dim == -1:
        return -1, None
    # without a group, a cut parameter can only be a matrix of its own (blockwise)
    group = _group_of(param, pg_collection, "tp", mode)
    return (-1, None) if _size(group) == 1 else (dim, group)


def row_group(
    param: Tensor, pg_collection: Any, mode: TpModeT = "blockwise"
) -> dist.ProcessGroup | None:
    """Return the group over which weight rematerialization cuts the rows of a parameter, or None.

    Raises:
        ConfigurationError: If rows are cut and the group is missing.
    """
    if not getattr(param, "is_gtp_weight_remat", False):
        return None
    own: dist.ProcessGroup | None = getattr(param, "group", None)
    group = _group_of(param, pg_collection, "gtp_remat", mode) if own is None else own
    if not hasattr(param, "gtp_remat_size"):
        # ``remat_size`` would otherwise ask Megatron's global group, which may have another size
        param.gtp_remat_size = _size(group)  # type: ignore[attr-defined]
    return None if _size(group) == 1 else group


def _group_of(
    param: Tensor, pg_collection: Any, kind: str, mode: TpModeT
) -> dist.ProcessGroup | None:
    is_expert = getattr(param, "expert_tp", False) or not getattr(param, "allreduce", True)
    name = f"expt_{kind}" if is_expert else kind
    group: dist.ProcessGroup | None = getattr(pg_collection, name, None)
    if group is None and mode != "blockwise":
        shape = tuple(param.shape)
        rule = f"must have the group {name!r}, because a parameter of shape {shape} is cut"
        hint = "Pass the model's process groups, or set partition_dim to -1 if nothing is cut"
        raise ConfigurationError("pg_collection", pg_collection, rule, hint)
    return group


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


class Slabs:
    """Knows the ranks that store a parameter: tensor-parallel ranks, and pieces of their rows.

    Where both cut, the group of all of them is created once, by its members.

    Args:
        pg_collection: Process groups; ``tp`` and ``gtp_remat`` and, for experts, ``expt_tp`` and
            ``expt_gtp_remat`` are used.
        mode: How matrices are computed; only "blockwise" does without groups of parameters that
            are cut.
    """

    def __init__(self, pg_collection: Any, mode: TpModeT = "blockwise") -> None:
        self._collection, self._mode = pg_collection, mode
        self._made: dict[tuple[Any, Any], tuple[Any, list[tuple[int, int]]]] = {}

    def ranks_of(self, param: Tensor) -> Ranks:
        """Return the ranks that store a parameter; collective over them if there may be several.

        Raises:
            ConfigurationError: If it is cut and the group is missing.
        """
        _, group = partition_dim_and_group(param, self._collection, self._mode)
        return self._grid(group, row_group(param, self._collection, self._mode))[0]

    def shard(self, name: str, param: Tensor, split_of: SplitOf) -> ParamShard:
        """Return the shard of a local parameter; collective over the ranks that store it."""
        cut = partition_dim_and_group(param, self._collection, self._mode)
        return self.shard_cut(name, param, split_of, *cut)

    def shard_cut(
        self,
        name: str,
        param: Tensor,
        split_of: SplitOf,
        dim: int,
        group: dist.ProcessGroup | None,
    ) -> ParamShard:
        """Return the shard of a parameter that tensor parallelism cuts in ``dim``, over ``group``.

        A ``dim`` of -1 and no group say that it does not.
        """
        rows = row_group(param, self._collection, self._mode)
        ranks, places = self._grid(group, rows)
        size = _size(group)
        shape = list(whole_shape(param) if rows is not None else param.shape)
        if dim != -1:
            # dimension 0 means rows, also of a 3-D weight of experts, where rows are dimension -2
            shape[dim - 2] *= size
        split = split_of(param, tuple(shape))
        numel = param.numel()
        # whole slabs; a piece of one has its own range below
        fragments = [Fragment(rank, 0, numel) for rank, _ in places]
        if rows is not None:
            cuts = zip(fragments, places, strict=True)
            fragments = [fragment.of_rows(param, piece) for fragment, (_, piece) in cuts]
        layouts = fragment_layouts(split, dim, size, fragments)
        own_fragment = fragments[ranks.rank]
        padding = numel - (own_fragment.stop - own_fragment.start)
        return ParamShard(name, param, split, layouts, ranks, tuple(param.shape), padding=padding)

    def _grid(
        self, tensor: dist.ProcessGroup | None, rows: dist.ProcessGroup | None
    ) -> tuple[Ranks, list[tuple[int, int]]]:
        """Return the ranks, and the tensor-parallel rank and piece of each; collective."""
        if _size(rows) == 1:
            ranks = Ranks.of(tensor)
            return ranks, [(rank, 0) for rank in range(ranks.size)]
        if _size(tensor) == 1:
            ranks = Ranks.of(rows)
            return ranks, [(0, piece) for piece in range(ranks.size)]
        if (tensor, rows) not in self._made:
            # Each rank knows only the tensor-parallel group that it is in. The ranks of `rows` are
            # in one each, and together know the whole grid.
            members = gather_objects(dist.get_process_group_ranks(tensor), rows)
            places = {
                rank: (number, piece)
                for piece, tensor_ranks in enumerate(members)
                for number, rank in enumerate(tensor_ranks)
            }
            # a group of the whole grid, because one all-to-all must reach all ranks that have a
            # part
            group = group_of_members(sorted(places))
            self._made[tensor, rows] = group, [places[rank] for rank in sorted(places)]
        group, grid_places = self._made[tensor, rows]
        return Ranks.of(group), grid_places
