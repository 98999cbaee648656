"""Dense and expert buffers of Megatron's DDP, and the process groups that share them.

The tensor-parallel x data-parallel ranks together store a whole matrix. Weight rematerialization
cuts the rows of a tensor-parallel slab over one more group. Megatron has this group for
dense parameters and one instance of the distributed optimizer. For several instances, and for
experts with tensor parallelism, all ranks create it here.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor, distributed

from megatron_eopt.base.agreement import any_rank, group_of_members, group_ranks_in, ranks_of
from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError
from megatron_eopt.megatron_core.process_groups import process_groups
from megatron_eopt.storage.shard import Ranks
from megatron_eopt.wrappers.zero1.all_reduced import AllReducedBuffer

_REUSE = "reuse_grad_buf_for_mxfp8_param_ag"


class RankGrid(NamedTuple):
    """A group, with three coordinates of each member, in group order."""

    ranks: Ranks
    tensor_ranks: tuple[int, ...]  # tensor-parallel rank
    row_ranks: tuple[int, ...]  # piece of the rows that weight rematerialization cuts
    data_ranks: tuple[int, ...]  # index of the fragment
    tensor_size: int


def data_parallel_only(grid: RankGrid, group: Any) -> RankGrid:
    """Return the grid of a data-parallel group, whose ranks share one tensor-parallel shard."""
    size = distributed.get_world_size(group)
    tensor, rows = (ranks[grid.ranks.rank] for ranks in (grid.tensor_ranks, grid.row_ranks))
    data = tuple(range(size))
    return RankGrid(Ranks.of(group), (tensor,) * size, (rows,) * size, data, grid.tensor_size)


def with_own_group(grid: RankGrid) -> RankGrid:
    """Return the grid with a process group of its own; collective over its ranks.

    Calls of one group run one after another. So what waits for a computation would also hold up
    Megatron's reductions, if they used the same group.
    """
    shared = grid.ranks.group
    if shared is None:
        return grid
    made = group_of_members(ranks_of(shared), shared.group_desc)
    assert ranks_of(made) == ranks_of(shared), "Megatron's groups are in the order of ranks"
    return grid._replace(ranks=Ranks.of(made))


def redistribution_grids(groups: Sequence[tuple[Any, Any, Any, Any]]) -> list[RankGrid]:
    """Return the grids spanned by the given groups; collective over the world.

    Args:
        groups: For each grid: the tensor-parallel group, the group over which weight
            rematerialization cuts rows, the group over which buffers are cut into fragments, and a
            group of Megatron's that may be the grid already. Any may be None.
    """
    places = group_ranks_in([group for *spanning, _ in groups for group in spanning])
    grids = []
    for number, (*_, data_group, existing) in enumerate(groups):
        tensor, rows, data = places[3 * number : 3 * number + 3]
        classes: dict[int, list[int]] = {}
        for rank, place in enumerate(tensor):
            # all members of a group use the key of its first rank
            classes.setdefault(data[rows[place.first].first].first, []).append(rank)
        own_ranks = next(ranks for ranks in classes.values() if distributed.get_rank() in ranks)
        existing_groups = (group for group in (data_group, existing) if group is not None)
        # a group of Megatron's is used again if it is the grid, because each communicator takes
        # memory
        group = next(
            (group for group in existing_groups if sorted(ranks_of(group)) == own_ranks), None
        )
        # ``new_group`` is collective over the world, so all ranks create all groups, or none
        if any_rank(group is None and len(own_ranks) > 1):
            made = [distributed.new_group(ranks) for ranks in classes.values()]
            group = made[list(classes.values()).index(own_ranks)] if len(own_ranks) > 1 else None
        # fragments are numbered by the rank in the data-parallel group
        tensor_ranks, row_ranks, data_ranks = (
            tuple(places[rank].number for rank in ranks_of(group))
            for places in (tensor, rows, data)
        )
        tensor_size = max(tensor_ranks) + 1
        grids.append(RankGrid(Ranks.of(group), tensor_ranks, row_ranks, data_ranks, tensor_size))
    return grids


class BufferSet(NamedTuple):
    """The dense or the expert buffers on this rank, and the groups that share them."""

    is_expert: bool
    buffers: dict[int, list[Any]]  # by model chunk: DDP's, or an AllReducedBuffer for each
    data: Any  # group over which the buffers are cut into fragments
    data_gloo: Any  # gloo group of the same ranks, for old checkpoint formats; may be None
    model_rank: int  # index of this rank's part of the model, for names in checkpoints
    grid: RankGrid | None  # the redistribution group; None if nothing is redistributed
    stats: Any  # group over which gradient statistics are summed
    instance: int  # index of this rank's instance of the distributed optimizer
    copy: int  # index of this rank's copy of parameters whose rows are not cut
    collection: Any  # the model's process groups

    @property
    def all_buffers(self) -> list[Any]:
        """The buffers of all chunks, in order."""
        return [buffer for buffers in self.buffers.values() for buffer in buffers]


_KINDS = (
    (False, "buffers", "intra_dp_cp_group", "mp_group"),
    (True, "expert_parallel_buffers", "intra_expt_dp_group", "expt_tp_pp_with_egtp_remat_group"),
)


def buffer_sets(
    model_chunks: Sequence[Any], pg_collection: Any, *, use_gloo: bool, redistributed: bool
) -> list[BufferSet]:
    """Return the dense buffer set and, if any rank of the world has experts, the expert set.

    All ranks call this together. If matrices are ``redistributed``, missing groups are created.
    """
    collection = process_groups(pg_collection)
    given = pg_collection if collection is pg_collection else None
    # without gloo here: with it, the function fails for a caller's own groups, and where Megatron
    # has created no gloo groups; ``_gloo_twin`` returns None there
    groups = ProcessGroupCollection.setup_process_groups_for_optimizer(
        given, list(model_chunks), use_gloo_process_groups=False
    )
    several = get_pg_size(groups["dp_cp_group"]) > get_pg_size(groups["intra_dp_cp_group"])
    shared = {
        "stats": groups["intra_dist_opt_group"],
        "instance": get_pg_rank(groups["inter_dist_opt_group"]) if several else 0,
        "collection": collection,
    }
    existing = getattr(collection, "tp_dp_cp", None)
    rows = [getattr(collection, name, None) for name in ("gtp_remat", "expt_gtp_remat")]
    wanted = [(collection.tp, rows[0], groups["intra_dp_cp_group"], existing)]
    # a stage without experts has an empty set, to take part in the creation of groups
    if any_rank(any(chunk.expert_parallel_buffers for chunk in model_chunks)):
        wanted.append((collection.expt_tp, rows[1], groups["intra_expt_dp_group"], None))
    grids = redistribution_grids(wanted) if redistributed else [None] * len(wanted)
    return [
        BufferSet(
            is_expert=is_expert,
            buffers={i: _buffers(chunk, attribute) for i, chunk in enumerate(model_chunks)},
            data=groups[data],
            data_gloo=_gloo_twin(groups[data], is_expert) if use_gloo else None,
            model_rank=get_pg_rank(groups[model]),
            copy=get_pg_rank(rows[is_expert]),
            grid=grid,
            **shared,
        )
        for grid, (is_expert, attribute, data, model) in zip(grids, _KINDS, strict=False)
    ]


def check_model_chunks(model_chunks: Sequence[Any], *, reuses: bool | None = None) -> None:
    """Raise unless the model is wrapped in Megatron's DDP in a supported mode.

    ``reuses`` says whether the optimizer's configuration gathers weights in gradient buffers; None
    if DDP's may differ.

    Raises:
        ConfigurationTypeError: If it is not wrapped.
        ConfigurationError: If only one of both configurations gathers weights there.
    """
    for chunk in model_chunks:
        # without the wrapper, `buffers` is torch's method
        if not (hasattr(chunk, "ddp_config") and isinstance(chunk.buffers, list)):
            rule = "must be wrapped in megatron.core.distributed.DistributedDataParallel"
            hint = "Wrap it in DDP with use_distributed_optimizer=True"
            raise ConfigurationTypeError("model_chunks", chunk, rule, hint)
        if reuses not in (None, getattr(chunk.ddp_config, _REUSE, False)):
            rule = "is set for only one of optimizer and DDP, so gradients would become weights"
            name = _REUSE if reuses else f"DistributedDataParallelConfig.{_REUSE}"
            raise ConfigurationError(name, True, rule, "Set it for both, or for neither")


def has_frozen(model_chunk: Any) -> bool:
    """Return whether the buffers of a wrapped model have parameters that are frozen now."""
    kinds = (getattr(model_chunk, attribute, ()) for _, attribute, *_ in _KINDS)
    # without the wrapper, `buffers` is torch's method
    buffers = [buffer for kind in kinds if isinstance(kind, list) for buffer in kind]
    return any(not param.requires_grad for buffer in buffers for param in buffer.params)


def check_buffers(
    buffers: Iterable[Any], groups: Iterable[Mapping[str, Any]], names: Mapping[Tensor, str]
) -> None:
    """Raise unless every trainable parameter of the buffers is in exactly one group.

    Frozen parameters may be another optimizer's.

    Raises:
        ConfigurationError: If a parameter is in no group or in several.
    """
    owners = Counter(param for group in groups for param in group["params"])
    for buffer in buffers:
        for param in buffer.params:
            count = owners[param]
            if count > 1 or (count == 0 and param.requires_grad):
                value = names.get(param, f"a parameter of shape {tuple(param.shape)}")
                rule = f"must be in exactly one parameter group, but is in {count}"
                hint = "Give every trainable parameter to one optimizer, or freeze it"
                raise ConfigurationError("optimizers", value, rule, hint)


def _buffers(chunk: Any, attribute: str) -> list[Any]:
    buffers = getattr(chunk, attribute)
    if chunk.ddp_config.use_distributed_optimizer:
        return list(buffers)
    return [
        AllReducedBuffer(buffer)
        for buffer in buffers
        if any(param.requires_grad for param in buffer.params)
    ]


def _gloo_twin(group: Any, is_expert: bool) -> Any:
    """Return Megatron's gloo group of the same ranks, or None if it was not created."""
    try:
        twin = (
            parallel_state.get_expert_data_parallel_group_gloo(partial_expert_data_parallel=True)
            if is_expert
            else parallel_state.get_data_parallel_group_gloo(
                with_context_parallel=True, partial_data_parallel=True
            )
        )
    except AssertionError:
        return None
    # a caller's own groups may have other ranks than Megatron's global ones
    same = distributed.get_process_group_ranks(twin) == distributed.get_process_group_ranks(group)
    return twin if same else None


def bucket_groups(model_chunks: Sequence[Any]) -> list[Any]:
    """Return all bucket groups, in the order in which a forward pass needs them."""
    return [
        group
        for chunk in model_chunks
        for group in (*chunk.bucket_groups[::-1], *chunk.expert_parallel_bucket_groups[::-1])
    ]


def windows_of(params: Sequence[Tensor], model_chunks: Sequence[Any]) -> tuple[int, ...]:
    """Return each parameter's window: its bucket group's index among those with parameters."""
    groups = bucket_groups(model_chunks)
    places = [next(n for n, group in enumerate(groups) if p in group.params) for p in params]
    return tuple(sorted(set(places)).index(place) for place in places)
