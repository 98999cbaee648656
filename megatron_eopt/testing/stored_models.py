"""A small model with fused weights, and the ways to store it that are compared."""

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
)
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from megatron_eopt.base.place import declared_box
from megatron_eopt.contrib import megatron_fsdp_v2 as _v2  # noqa: F401  registers itself
from megatron_eopt.contrib.declared_boxes import build_sharded
from megatron_eopt.matrices import Field, Section, Split, gated
from megatron_eopt.routing.plain_names import plain_names
from megatron_eopt.storage import local_tensors
from megatron_eopt.storage.local_tensors import shard_like
from megatron_eopt.wrappers.builders import OptimizerBuildContext
from megatron_eopt.wrappers.chain import OptimizerChain
from megatron_eopt.wrappers.megatron_fsdp import fsdp_modules


class SmallModel(nn.Module):
    """Layers with plain and fused weights, and what Adam trains."""

    def __init__(self) -> None:
        super().__init__()
        self.config = TransformerConfig(
            num_layers=1, hidden_size=16, num_attention_heads=1, cuda_graph_modules=[]
        )
        self.qkv = nn.Linear(16, 96)
        self.gate_up = nn.Linear(16, 24, bias=False)
        self.tall, self.wide = nn.Linear(16, 40, bias=False), nn.Linear(40, 16)
        self.square = nn.Linear(16, 16, bias=False)
        self.norm = nn.LayerNorm(16)
        self.table = nn.Embedding(11, 16)
        # in small waves, the rank that stores the first rows has them back before the others
        parts = (Section((Field("q", 10),)), Section((Field("kv", 86),)))
        self.qkv.weight.eopt_split = Split("qkv", (96, 16), parts)  # type: ignore[attr-defined]
        self.gate_up.weight.eopt_split = gated((24, 16))  # type: ignore[attr-defined]
        for name, param in self.named_parameters():
            # bfloat16 has the same numbers
            param.data.copy_(random_tensor(name, tuple(param.shape)).bfloat16())


def random_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the same numbers for a name in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator)


SHAPES = {name: tuple(param.shape) for name, param in SmallModel().named_parameters()}


def named_params(chunk: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names, without wrappers, and parameters of a stored model."""
    for module in fsdp_modules([chunk]):
        # a step leaves the whole parameters, as a forward pass needs them
        module._replace_param_with_distributed_if_needed()
    plain = plain_names(chunk)
    for name, param in chunk.named_parameters():
        yield plain[name], param


def part_of(param: Tensor, whole: Tensor) -> Tensor:
    """Return what this rank stores of a tensor that is cut like ``param``."""
    if isinstance(param, DTensor):
        return shard_like(param, local_tensors.part_of(param, whole).contiguous())
    place = declared_box(param)
    if place is not None:
        for dim, (first, size) in enumerate(zip(place.offset, param.shape, strict=True)):
            whole = whole.narrow(dim, first, size)
    return whole.contiguous()


# Ways to store the model


def in_zero1(model: nn.Module) -> Any:
    """Store a model in fragments, as ``use_distributed_optimizer=True`` does."""
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True
    )
    return DistributedDataParallel(model.config, ddp_config, model)


def in_copies(model: nn.Module) -> Any:
    """Store a copy on each rank, as without the distributed optimizer."""
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(model.config, ddp_config, model)


def in_fsdp2(model: nn.Module) -> Any:
    """Store rows of each parameter as DTensors, as megatron-core's wrapper of torch's FSDP2."""
    config = TorchFullyShardedDataParallelConfig()
    return TorchFullyShardedDataParallel(model.config, config, model)


def in_megatron_fsdp(model: nn.Module) -> Any:
    """Store ranges of flattened parameters, as the first version of Megatron-FSDP."""
    return _in_megatron_fsdp(model)


def in_megatron_fsdp_v2(model: nn.Module) -> Any:
    """Store rows of each module's parameters, as the second version of Megatron-FSDP."""
    return _in_megatron_fsdp(model, megatron_fsdp_version=2)


def _in_megatron_fsdp(model: Any, **version: int) -> Any:
    model.config.gradient_accumulation_fusion = False
    ddp_config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        gradient_reduce_div_fusion=False,
        **version,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return FullyShardedDataParallel(
        model.config, ddp_config, model, fsdp_unit_modules=[nn.Linear], pg_collection=groups
    )


def in_rows(model: nn.Module) -> Any:
    """Store any number of rows of each parameter on each rank; norms are copies."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    for number, (name, param) in enumerate(model.named_parameters()):
        rows, *others = param.shape
        shares = (0, rows) if ranks == 1 else (0, rows * (1, 4, 0, 9, 6)[number % 5] // 9, rows)
        first, stop = (0, rows) if name.startswith("norm") else shares[rank : rank + 2]
        param.eopt_place = ((first, *(0 for _ in others)), tuple(param.shape))  # type: ignore[attr-defined]
        param.data = param.data[first:stop].clone()
    model.in_rows = True  # type: ignore[assignment]
    return model


def build_in_rows(context: OptimizerBuildContext) -> OptimizerChain | None:
    """Build the optimizer of a model that :func:`in_rows` has stored."""
    if not hasattr(context.model_chunks[0], "in_rows"):
        return None
    assert distributed.group.WORLD is not None
    return build_sharded(context, distributed.group.WORLD)


STORAGES = (in_zero1, in_rows, in_fsdp2, in_megatron_fsdp, in_megatron_fsdp_v2, in_copies)
"""What :func:`check` checks without a storage of the caller's."""

HAS_VERSION_2 = hasattr(DistributedDataParallelConfig, "megatron_fsdp_version")
