"""Dense and experts' buffers with the groups of ranks that share them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import distributed

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.storage.redistribution_groups import (
    Coordinates,
    RankGrid,
    redistribution_groups,
)
from megatron_eopt.storage.replicated import ReplicatedBuffer

__all__ = ["BufferSet", "buffer_sets"]


@dataclass(frozen=True)
class BufferSet:
    """The buffers of one kind on this rank, and who holds what of them.

    Attributes:
        is_expert: Whether they hold experts' parameters.
        buffers: Buffers by model chunk: DDP's, or ours if its parameters lie apart.
        data: Ranks over which the buffers are cut into fragments.
        data_gloo: The same ranks over gloo, for old checkpoint formats; may be None.
        model_rank: Number of this rank's part of the model, for names in checkpoints.
        ranks: The redistribution group.
        stats: Ranks over which gradient statistics add up.
        instance: Number of this rank's instance of the distributed optimizer.
        tensor: Tensor-parallel group of dense parameters.
        expert_tensor: Tensor-parallel group of experts' parameters.
    """

    is_expert: bool
    buffers: dict[int, list[Any]]
    data: Any
    data_gloo: Any
    model_rank: int
    ranks: RankGrid
    stats: Any
    instance: int
    tensor: Any
    expert_tensor: Any

    @property
    def all_buffers(self) -> list[Any]:
        """The buffers of all chunks, in their order."""
        return [buffer for buffers in self.buffers.values() for buffer in buffers]


def buffer_sets(model_chunks: Sequence[Any], pg_collection: Any) -> list[BufferSet]:
    """Return the dense set and, if any rank of the world has experts, the experts'.

    All ranks call this together; groups that Megatron does not have are created here.

    Args:
        model_chunks: The wrapped model.
        pg_collection: Process groups; None means Megatron's global ones.

    Raises:
        ConfigurationError: If there are experts and a group for them is missing.
    """
    collection = pg_collection
    if collection is None or getattr(collection, "tp", None) is None:
        pg_collection, collection = None, ProcessGroupCollection.use_mpu_process_groups()
    found = ProcessGroupCollection.setup_process_groups_for_optimizer(
        pg_collection, list(model_chunks), use_gloo_process_groups=False
    )
    several = get_pg_size(found["dp_cp_group"]) > get_pg_size(found["intra_dp_cp_group"])
    shared = {
        "stats": found["intra_dist_opt_group"],
        "instance": get_pg_rank(found["inter_dist_opt_group"]) if several else 0,
        "tensor": collection.tp,
        "expert_tensor": _get(collection, "expt_tp") or collection.tp,
    }
    wanted = [Coordinates(collection.tp, found["intra_dp_cp_group"], _get(collection, "tp_dp_cp"))]
    with_experts = _on_any_rank(any(chunk.expert_parallel_buffers for chunk in model_chunks))
    if with_experts:
        _check_expert_groups(collection, found)
        wanted.append(Coordinates(_get(collection, "expt_tp"), found["intra_expt_dp_group"]))
    ranks = redistribution_groups(wanted)
    return [
        BufferSet(
            is_expert=is_expert,
            buffers={i: _buffers(chunk, attribute) for i, chunk in enumerate(model_chunks)},
            data=found[data],
            data_gloo=_gloo_twin(found[data], is_expert),
            model_rank=get_pg_rank(found[model]),
            ranks=here,
            **shared,
        )
        for here, (is_expert, attribute, data, model) in zip(ranks, _KINDS, strict=False)
    ]


_KINDS = (
    (False, "buffers", "intra_dp_cp_group", "mp_group"),
    (True, "expert_parallel_buffers", "intra_expt_dp_group", "expt_tp_pp_with_egtp_remat_group"),
)


def _get(collection: Any, name: str) -> Any:
    return getattr(collection, name, None)


def _buffers(chunk: Any, attribute: str) -> list[Any]:
    buffers = getattr(chunk, attribute)
    if chunk.ddp_config.use_distributed_optimizer:
        return list(buffers)
    return [ReplicatedBuffer(buffer) for buffer in buffers]


def _on_any_rank(flag: bool) -> bool:
    value = torch.tensor([flag], dtype=torch.int32, device="cuda")
    distributed.all_reduce(value, op=distributed.ReduceOp.MAX)
    return bool(value.item())


def _check_expert_groups(collection: Any, found: Any) -> None:
    groups = {"expt_tp": _get(collection, "expt_tp"), "expt_dp": found["intra_expt_dp_group"]}
    for name, group in groups.items():
        if group is None:
            raise ConfigurationError(
                f"pg_collection.{name}",
                None,
                "must be the group that experts' weights are cut or copied over, since the model "
                "has experts",
                "Add it to the collection, or pass pg_collection=None to use Megatron's own groups",
            )


def _gloo_twin(group: Any, is_expert: bool) -> Any:
    """Return Megatron's gloo group over the same ranks, None if it did not make one."""
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
    same = distributed.get_process_group_ranks(twin) == distributed.get_process_group_ranks(group)
    return twin if same else None
