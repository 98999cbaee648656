"""Optimizers of models in megatron-core's ``TorchFullyShardedDataParallel``.

One optimizer steps all of the model's DTensors. It sits in megatron-core's usual wrapper and chain,
so that gradients are prepared, clipped and counted as always.
"""

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import TorchFullyShardedDataParallel

from megatron_eopt.build.bases import shares_of
from megatron_eopt.build.chain import OptimizerChain
from megatron_eopt.build.dtensors import build_routed
from megatron_eopt.build.replicated import set_groups
from megatron_eopt.build.storages import Wanted
from megatron_eopt.optimizers.member import Member
from megatron_eopt.stores.dtensors import Float32Shards, MainShards, check_parameters


def is_torch_fsdp2(model_chunks: Sequence[Any]) -> bool:
    """Whether torch's ``fully_shard`` manages the model, in megatron-core's wrapper."""
    return any(isinstance(chunk, TorchFullyShardedDataParallel) for chunk in model_chunks)


def chain_of_dtensors(wanted: Wanted) -> "DTensorChain | None":
    """Return the chain whose one optimizer steps all DTensors of the model; collective.

    Raises:
        ConfigurationError: If a field or a parameter cannot be honoured.
    """
    settings, routing, model_chunks = wanted.settings, wanted.routing, wanted.model_chunks
    if settings.is_standard or not is_torch_fsdp2(model_chunks):
        return None
    check_parameters([route.parameter for route in routing.routes])
    shares = shares_of(routing.groups, settings.optimizer, len(model_chunks))
    inner = build_routed(settings, routing, shares)
    params = [inner.params_of(driver) for driver in inner.drivers]
    storage: Any
    if settings.half:
        storage = MainShards(inner, settings.config, None, _state_exists)
        inner.follow({item.param: item.main for item in storage.stored()})
    else:
        storage = Float32Shards(inner, settings.config, _state_exists)
    set_groups(storage, wanted.collection.mp, wanted.collection)
    return DTensorChain([Member(storage, inner.drivers, params)], settings, None, model_chunks)


class DTensorChain(OptimizerChain):
    """A chain over DTensors."""

    # the trainer's loader hands a loaded state dict over: not all of it was read into tensors
    loads_itself = True


def _state_exists(*_: Any) -> None:
    """Do nothing: a ``ShardedOptimizer`` makes its state when it is built."""
