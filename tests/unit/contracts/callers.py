"""Training as callers see it: build, step with a scheduler, and do something between the steps."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_eopt import get_megatron_optimizer
from tests.harness import models
from tests.harness.megatron import initialize_megatron
from tests.harness.models import assert_same, copies_of, synthetic_batch, tiny_gpt, wrap_ddp
from tests.unit.storage.runs import FP16, SHARDED

Between = Callable[[Any, Any], None]
"""Called with the optimizer and the wrapped model."""


@dataclass(frozen=True)
class Storage:
    """One way to keep an optimizer's state."""

    config: dict[str, Any]  # fields of ``OptimizerConfig``
    ddp: dict[str, Any] = field(default_factory=dict)  # of ``DistributedDataParallelConfig``
    world: int = 2  # number of processes


STORAGES = {
    "replicated-adam": Storage({"optimizer": "adam"}, world=1),
    "replicated-muon": Storage({"optimizer": "muon"}, world=1),
    "distributed-adam": Storage({"optimizer": "adam"} | SHARDED, SHARDED),
    "layer-wise-muon": Storage({"optimizer": "muon"} | SHARDED, SHARDED),
    "layer-wise-muon-plain-ddp": Storage({"optimizer": "muon"} | SHARDED),
    "layer-wise-soap": Storage({"optimizer": "soap"} | SHARDED, SHARDED),
}

PRECISIONS: dict[str, dict[str, Any]] = {"float32": {}, "bfloat16": {"bf16": True}}
PRECISIONS["float16"] = FP16 | {"initial_loss_scale": 64.0}


def build(storage: Storage, dtype: str = "float32", **fields: Any) -> tuple[Any, Any]:
    """Return a wrapped model and its optimizer; the same weights at every call."""
    if not parallel_state.model_parallel_is_initialized():
        initialize_megatron()
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    chunk = wrap_ddp(tiny_gpt(layers=1, bias=True, dtype=getattr(torch, dtype)), **storage.ddp)
    settings = {"lr": 0.01, "min_lr": 0.001, "weight_decay": 0.1, "clip_grad": 1.0}
    config = OptimizerConfig(**(settings | PRECISIONS[dtype] | storage.config | fields))
    chunk.config.grad_scale_func = None
    optimizer = get_megatron_optimizer(config, [chunk], use_gloo_process_groups=False)
    if PRECISIONS[dtype]:
        chunk.module.config.grad_scale_func = optimizer.scale_loss
    return chunk, optimizer


def scheduler_of(optimizer: Any) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer, 0.0, 0.01, 0.001, 2, 10, "cosine", 0.1, 0.1, 10, "constant"
    )


def gradients(chunk: Any, optimizer: Any, step: int) -> None:
    """Zero and compute the gradients of one step."""
    optimizer.zero_grad()
    rank = parallel_state.get_data_parallel_rank()
    models.forward_backward([chunk], [synthetic_batch(1000 * rank + step)])


@dataclass
class Outcome:
    """What can be told apart after some steps."""

    weights: dict[str, torch.Tensor]
    steps: list[tuple[Any, ...]]

    def assert_equals(self, other: "Outcome") -> None:
        assert self.steps == other.steps
        assert_same(other.weights, self.weights)


def train(
    storage: Storage,
    dtype: str = "float32",
    *,
    steps: int = 4,
    before_step: Between = lambda *_: None,
    after_step: Between = lambda *_: None,
    **fields: Any,
) -> Outcome:
    """Train with the real scheduler; every step calls what a caller does around ``step()``."""
    chunk, optimizer = build(storage, dtype, **fields)
    scheduler = scheduler_of(optimizer)
    told = []
    for step in range(steps):
        scheduler.step(1)
        gradients(chunk, optimizer, step)
        before_step(optimizer, chunk)
        told.append((*optimizer.step(), float(optimizer.get_loss_scale())))
        after_step(optimizer, chunk)
    return Outcome(copies_of(chunk), told)


def state_tensors(optimizer: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield where every state tensor is found by the walk that all RL frameworks do."""
    for child in optimizer.chained_optimizers:
        for state in child.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield state, key


def main_params(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the float32 main parameters as RL frameworks find them."""
    names = ("shard_fp32_from_float16_groups", "shard_fp32_groups", "fp32_from_float16_groups")
    for child in optimizer.chained_optimizers:
        for name in names:
            for group in getattr(child, name, []):
                yield from (param for param in group if param is not None)


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a move to another device returns: the same values in other memory."""
    return tensor.detach().clone()
