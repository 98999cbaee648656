"""Optimizers of models that megatron-core's FSDP manages.

One optimizer steps all of the model's shards, as under torch's. What routing asks of parameters the
whole ones say; the DTensors take their places afterwards.
"""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer.clip_grads import count_zeros_fp32
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

from megatron_eopt.base.agreement import agreed
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.build.bases import shares_of
from megatron_eopt.build.chain import OptimizerChain
from megatron_eopt.build.ddp import is_megatron_fsdp
from megatron_eopt.build.fsdp2 import build_routed
from megatron_eopt.build.managed import refuse_unmanageable
from megatron_eopt.build.replicated import set_groups
from megatron_eopt.build.storages import Wanted
from megatron_eopt.checkpoint import fsdp_dtensor, optimizer_state
from megatron_eopt.optimizers.member import Member
from megatron_eopt.stores.megatron_fsdp import ManagedShards, shards_of_parameters


def chain_of_managed_shards(wanted: Wanted) -> "ManagedChain | None":
    """Return the chain whose one optimizer steps all shards of the model; collective.

    Raises:
        ConfigurationError: If a field or a parameter cannot be honoured.
    """
    settings, model_chunks = wanted.settings, wanted.model_chunks
    if not is_megatron_fsdp(model_chunks):
        return None
    refuse_unmanageable(settings, model_chunks)
    routing = wanted.routing.over(shards_of_parameters(model_chunks))
    shares = shares_of(routing.groups, settings.optimizer, len(model_chunks))
    inner = build_routed(settings, routing, shares)
    storage = ManagedShards(inner, settings.config, model_chunks)
    set_groups(storage, _stats_group(wanted), wanted.collection)
    params = [inner.params_of(driver) for driver in inner.drivers]
    return ManagedChain([Member(storage, inner.drivers, params)], settings, None, model_chunks)


def _stats_group(wanted: Wanted) -> Any:
    """Return the ranks over which gradients, each on one of them, add up."""
    if wanted.model_chunks[0].ddp_config.data_parallel_sharding_strategy == "no_shard":
        return wanted.collection.mp
    groups = ProcessGroupCollection.setup_process_groups_for_optimizer(
        wanted.pg_collection, wanted.model_chunks, use_gloo_process_groups=False
    )
    return groups["intra_dist_opt_group"]


class ManagedChain(OptimizerChain):
    """A chain over the shards that megatron-core's FSDP manages."""

    @torch.no_grad()
    def count_zeros(self) -> Any:
        """Return how many numbers of all gradients are zero, copies of a weight counted once."""
        storage: Any = self.members[0].storage
        groups = {"tp_group": storage.tp_group, "expert_tp_group": storage.expert_tp_group}
        params = storage.get_parameters()
        return count_zeros_fp32(
            [param for param in params if param_is_not_tensor_parallel_duplicate(param, **groups)],
            grad_stats_parallel_group=storage.get_grad_stats_parallel_group(),
            **groups,
        )

    def gather_params(self, *, now: bool = False) -> None:
        """Bring the stepped weights to all ranks ``now``; the storage has begun to, otherwise."""
        for member in self.members:
            member.storage.gather_params(now=now)

    def sharded_state_dict(
        self, model_sharded_state_dict: Mapping[str, Any], is_loading: bool = False, **kwargs: Any
    ) -> Any:
        """Return what the trainer saves, or loads in place; collective.

        Raises:
            ConfigurationError: If the checkpoint is of another format than ``fsdp_dtensor``, or an
                owner keeps state that could not be restored.
        """
        metadata = kwargs.get("metadata") or {}
        form = kwargs.get("sharding_type") or metadata.get("distrib_optim_sharding_type")
        if form != fsdp_dtensor.FORMAT:
            rule = "does not hold what Megatron-FSDP stores"
            raise ConfigurationError("ckpt_format", form, rule, f"Use {fsdp_dtensor.FORMAT!r}")
        return fsdp_dtensor.requested(self.members[0], is_loading=is_loading)

    def load_state_dict(self, state_dict: Any) -> None:
        """Take over what was loaded into :meth:`sharded_state_dict`, or a state; collective."""
        if isinstance(state_dict, Mapping) and fsdp_dtensor.GROUPS in state_dict:
            agreed(lambda: fsdp_dtensor.load(self.members[0], state_dict))
            optimizer_state.settle(self.members)
        else:
            super().load_state_dict(state_dict)
        self.gather_params(now=True)
