"""The process groups that the optimizers of one model communicate over."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_pg_rank, get_pg_size

from megatron_eopt.assembly.meaning import Meaning


@dataclass(frozen=True)
class Sharding:
    """Where fragments of dense, or of experts', parameters live.

    Attributes:
        data_parallel: Ranks that hold the fragments of one buffer.
        data_parallel_gloo: The same ranks over gloo, for old checkpoint formats; may be None.
        model_parallel_rank: Number of this rank's part of the model.
    """

    data_parallel: Any
    data_parallel_gloo: Any
    model_parallel_rank: int


@dataclass(frozen=True)
class OptimizerGroups:
    """Process groups by purpose.

    Attributes:
        collection: Megatron's collection, as optimizer classes take it.
        model: Ranks over which the gradient norm of dense parameters adds up.
        expert_model: The same for experts' parameters.
        stats: Ranks over which gradient statistics of fragments add up.
        dense: Where fragments of dense parameters live; None unless storage is distributed.
        expert: Where fragments of experts' parameters live.
        instance: Number of this rank's instance of the distributed optimizer.
    """

    collection: Any
    model: Any
    expert_model: Any
    stats: Any = None
    dense: Sharding | None = None
    expert: Sharding | None = None
    instance: int = 0
    tensor: Any = field(init=False)
    expert_tensor: Any = field(init=False)

    def __post_init__(self) -> None:
        tensor = getattr(self.collection, "tp", None)
        object.__setattr__(self, "tensor", tensor)
        object.__setattr__(self, "expert_tensor", getattr(self.collection, "expt_tp", tensor))


def optimizer_groups(
    meaning: Meaning, model_chunks: Sequence[Any], use_gloo: bool, pg_collection: Any
) -> OptimizerGroups:
    """Return the groups that ``meaning`` needs, from the caller's collection or Megatron's own.

    Args:
        meaning: The configuration.
        model_chunks: The wrapped model.
        use_gloo: Whether gloo groups may be used.
        pg_collection: A ``ProcessGroupCollection``; None means Megatron's global groups.

    Raises:
        ValueError: If the collection lacks a group.
    """
    collection = pg_collection
    if collection is None or not hasattr(collection, "tp"):
        collection = ProcessGroupCollection.use_mpu_process_groups()
    if meaning.storage != "distributed":
        return OptimizerGroups(
            collection, collection.mp, getattr(collection, "tp_ep_pp", collection.mp)
        )
    found = ProcessGroupCollection.setup_process_groups_for_optimizer(
        pg_collection, list(model_chunks), use_gloo
    )
    expert_model = found["expt_tp_pp_with_egtp_remat_group"]
    several = get_pg_size(found["dp_cp_group"]) > get_pg_size(found["intra_dp_cp_group"])
    return OptimizerGroups(
        collection,
        model=found["mp_group"],
        expert_model=expert_model,
        stats=found["intra_dist_opt_group"],
        dense=Sharding(
            found["intra_dp_cp_group"],
            found["intra_dp_cp_group_gloo"],
            get_pg_rank(found["mp_group"]),
        ),
        expert=Sharding(
            found["intra_expt_dp_group"],
            found["intra_expt_dp_group_gloo"],
            get_pg_rank(expert_model),
        ),
        instance=get_pg_rank(found["inter_dist_opt_group"]) if several else 0,
    )
