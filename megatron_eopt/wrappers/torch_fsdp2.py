"""DTensors under Megatron's training loop.

The optimizer is put into one of megatron-core's wrappers and into a chain, which prepares and clips
gradients.
"""

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import TorchFullyShardedDataParallel
from torch import Tensor

from megatron_eopt.base.agreement import raise_together
from megatron_eopt.fsdp2.dtensors import build_dtensors, check_parameters
from megatron_eopt.fsdp2.optimizer import DTensorOptimizer
from megatron_eopt.megatron_core.stored_weights import StoredWeights
from megatron_eopt.optimizers.off_loading import off_load
from megatron_eopt.routing.parameters import check_dtypes
from megatron_eopt.wrappers.builders import OptimizerBuildContext
from megatron_eopt.wrappers.chain import OptimizerChain
from megatron_eopt.wrappers.replicated import (
    Float32Optimizer,
    MainParamsOptimizer,
    state_exists,
)


class LocalShards:
    """Steps shards of DTensors; a mixin for wrappers of whole parameters."""

    def replica_of_matrix(self, param: Tensor, replica: Any) -> tuple[int, ...]:
        """Return the same on all ranks, because there are no copies of such state."""
        return (0, 0, 0)


class Float32Shards(LocalShards, Float32Optimizer):
    """For float32: steps the parameters' shards themselves."""


class MainShards(LocalShards, MainParamsOptimizer):
    """For bf16: steps float32 copies of the shards."""


def is_torch_fsdp2(model_chunks: Sequence[Any]) -> bool:
    """Return whether megatron-core's wrapper of torch's ``fully_shard`` manages the model."""
    return any(isinstance(chunk, TorchFullyShardedDataParallel) for chunk in model_chunks)


def build_torch_fsdp2(context: OptimizerBuildContext) -> OptimizerChain | None:
    """Return the chain for a ``fully_shard`` model; its one optimizer steps all DTensors."""
    settings, routing = context.settings, context.routing
    if not is_torch_fsdp2(context.model_chunks):
        return None
    check_parameters(routing.names)
    what = "torch's FSDP2 under Megatron"
    raise_together(lambda: check_dtypes(routing.names, what, double=not settings.half))
    inner = build_dtensors(settings, routing)
    return chain_of_shards(inner, context, context.collection.mp, context.collection)


def chain_of_shards(
    inner: DTensorOptimizer,
    context: OptimizerBuildContext,
    norm_group: Any,
    collection: Any,
    scaler: Any = None,
) -> OptimizerChain:
    """Return the chain of an optimizer of DTensors, with float32 main weights if needed.

    For ``norm_group`` and ``collection``, see :meth:`StoredWeights.count_in`.
    """
    config = context.settings.config
    storage: StoredWeights
    if context.settings.half:
        storage = MainShards(inner, config, scaler, state_exists)
    else:
        storage = Float32Shards(inner, config, state_exists)
    storage.count_in(norm_group, collection)
    chain = chain_over(storage, context, scaler=scaler)
    # not all state is loaded in place, so the trainer must call load_state_dict
    chain.loads_itself = True
    return chain


def chain_over(
    storage: StoredWeights,
    context: OptimizerBuildContext,
    cls: type[OptimizerChain] = OptimizerChain,
    scaler: Any = None,
) -> OptimizerChain:
    """Return the chain, an instance of ``cls``, of a storage over an optimizer of DTensors."""
    storage.set_assigned(storage.optimizer.assigned)
    off_load(storage.optimizer, context.settings)
    return cls([storage], context.settings, scaler, context.model_chunks)
