"""A module that is not Megatron's own, in each of Megatron's storages."""

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import nn

from megatron_eopt import EmergingOptimizerConfig, get_megatron_optimizer
from tests.harness.megatron import initialize_megatron
from tests.harness.models import wrap_ddp, wrap_fsdp2
from tests.unit.fsdp2.models import gradient, named, shard, whole
from tests.unit.storage.runs import set_rates

STORAGES = ("replicated", "sharded", "fsdp2", "megatron_fsdp")
FIELDS = {"optimizer": "muon", "lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0}


class Foreign(MegatronModule):
    """Convolutions, a weight that is stored transposed, and a linear layer."""

    def __init__(self) -> None:
        super().__init__(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1))
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 8, 3)
        self.grouped = nn.Conv1d(4, 6, 3, groups=2)
        self.turned = nn.Linear(8, 5, bias=False)
        self.hidden = nn.Linear(8, 4)

    def declare(self) -> "Foreign":
        self.turned.weight.eopt_split = "transposed"  # type: ignore[assignment]
        return self


def wrapped(storage: str, model: Any, **of_ddp: Any) -> Any:
    initialize_megatron()
    if storage == "fsdp2":
        return wrap_fsdp2(model)
    if storage == "megatron_fsdp":
        ddp_config = DistributedDataParallelConfig(
            use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params"
        )
        units = [nn.Linear]
        return FullyShardedDataParallel(model.config, ddp_config, model, fsdp_unit_modules=units)
    return wrap_ddp(model, use_distributed_optimizer=storage == "sharded", **of_ddp)


def built(storage: str, chunk: Any, overrides: Any = None, **fields: Any) -> Any:
    """Return an optimizer at its configuration's rates."""
    fields = FIELDS | {"muon_fp32_matmul_prec": "highest"} | fields
    sharded = storage in ("sharded", "megatron_fsdp")
    config = EmergingOptimizerConfig(use_distributed_optimizer=sharded, **fields)
    optimizer = get_megatron_optimizer(config, [chunk], overrides)
    set_rates(optimizer, config)
    return optimizer


def parameters(chunk: Any) -> dict[str, Any]:
    """Return the parameters that are stepped, by their names in the model."""
    if hasattr(getattr(chunk, "module", None), "_replace_param_with_distributed_if_needed"):
        chunk.module._replace_param_with_distributed_if_needed()
    return {name.replace("module.", ""): param for name, param in named(chunk).items()}


def inject(storage: str, chunk: Any, step: int) -> None:
    for name, param in parameters(chunk).items():
        grad = gradient(name, param.shape, step).to(param.dtype)
        if storage in ("replicated", "sharded"):
            param.main_grad.copy_(grad)
        else:
            grad = shard(grad, param)
            local = getattr(grad, "_local_tensor", grad)
            param.grad = grad if local.numel() else None


def step(storage: str, chunk: Any, optimizer: Any, first: int = 0, end: int = 3) -> None:
    for number in range(first, end):
        optimizer.zero_grad()
        inject(storage, chunk, number)
        optimizer.step()


def weights(chunk: Any) -> dict[str, torch.Tensor]:
    return {name: whole(param) for name, param in parameters(chunk).items()}
