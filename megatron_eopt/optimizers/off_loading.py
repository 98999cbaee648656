"""Decide which weights and state of a storage are kept in host memory."""

from megatron_eopt.base.address import address_of
from megatron_eopt.config.settings import RunSettings
from megatron_eopt.optimizers.host_memory import OffloadSettings
from megatron_eopt.optimizers.sharded_optimizer import ShardedOptimizer
from megatron_eopt.storage.local_tensors import local_of


def off_load(optimizer: ShardedOptimizer, settings: RunSettings) -> None:
    """Keep the fraction of main weights and state that the settings ask for."""
    if not settings.offload_fraction:
        return
    # not the model's own weights, which float32 training steps, nor those in FSDP's buffers
    own = [
        shard.main
        for shard in optimizer.shards
        if shard.main is not None
        and address_of(local_of(shard.main))[0] != address_of(local_of(shard.param))[0]
    ]
    params = (local_of(p) for group in optimizer.param_groups for p in group["params"])
    optimizer.off_load(
        OffloadSettings(
            settings.offload_fraction,
            frozenset(own),
            next((param.device for param in params), "cpu"),
            int(settings.config.matrix_buffer_mb * 2**20),
        )
    )
