"""What other optimizers would take on the same rank: Adam, and megatron-core's two ways of Muon."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.layer_wise_optimizer import (
    LayerWiseDistributedOptimizer,
    tag_params_for_buffer_routing,
)
from torch import Tensor, nn

from megatron_eopt.dry_run import Report
from megatron_eopt.layouts import iteration_cost
from megatron_eopt.plan.cost import adam_seconds
from megatron_eopt.plan.machine import Machine

_WEIGHT_AND_MOMENTUM = 8
"""Bytes of a main weight and its momentum in float32."""


@dataclass(frozen=True)
class Padded:
    """megatron-core's layer-wise layout of some parameters.

    Attributes:
        padding: Elements of its buffers over those of the parameters.
        loads: Operations of each rank.
    """

    padding: float
    loads: tuple[float, ...]

    @property
    def imbalance(self) -> float:
        """Largest load over the mean."""
        return float(np.max(self.loads) / np.mean(self.loads))


@dataclass(frozen=True)
class Peers:
    """Others on the same rank; operations are those of the standard iteration.

    Attributes:
        adam: Seconds of Adam on as many weights as the rank steps.
        plain_flops: Operations of plain Muon, which computes all of the stage on every rank.
        plain_state: Bytes of its main weights and momenta.
        padded_flops: Operations of the busiest rank of padded layer-wise storage.
        padding: Largest padding of its buffers, over the parameters.
    """

    adam: float
    plain_flops: float
    plain_state: int
    padded_flops: float
    padding: float


def peers_of(chunk: Any, report: Report, machine: Machine) -> Peers:
    """Count what others would do for the stage of a dry run."""
    costs = _costs(report)
    matrices = [(name, param) for name, param in chunk.module.named_parameters() if name in costs]
    padded = [
        padded_layout([param.shape for _, param in part], [costs[name] for name, _ in part], size)
        for size, part in _by_ranks(chunk, matrices).items()
    ]
    return Peers(
        adam=adam_seconds(sum(report.elements.values()), machine),
        plain_flops=sum(costs[name] for name, _ in matrices),
        plain_state=_WEIGHT_AND_MOMENTUM * sum(param.numel() for _, param in matrices),
        padded_flops=sum(max(item.loads) for item in padded),
        padding=max((item.padding for item in padded), default=1.0),
    )


def padded_layout(
    shapes: Sequence[Sequence[int]],
    costs: Sequence[float],
    world_size: int,
    bucket_size: int | None = None,
) -> Padded:
    """Run megatron-core's layout function on parameters without storage, and read it.

    Args:
        shapes: Of the parameters, matrices all of them.
        costs: Operations on each.
        world_size: Ranks that the buffers are cut over.
        bucket_size: Elements from which on a bucket is full; None for one bucket.
    """
    holder = nn.ParameterList(
        nn.Parameter(torch.empty(tuple(shape), device="meta", dtype=torch.bfloat16))
        for shape in shapes
    )
    tag_params_for_buffer_routing([holder])
    params = list(holder)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    full = LayerWiseDistributedOptimizer.compute_full_param_layout(
        params, bucket_size, world_size, config
    )
    (layout,) = full.layouts.values()
    loads = np.zeros(world_size)
    for param, cost in zip(params, costs, strict=True):
        start, _, bucket = layout.param_index_map[param]
        first, last = layout.bucket_indices[bucket]
        loads[(start - first) * world_size // (last - first)] += cost
    elements = sum(param.numel() for param in params)
    return Padded(layout.bucket_indices[-1][1] / elements, tuple(loads.tolist()))


def _costs(report: Report) -> dict[str, float]:
    """Return the operations of the standard iteration on all matrices of each parameter."""
    costs: dict[str, float] = defaultdict(float)
    for _, schedule in report.schedules:
        for name, work in zip(schedule.names, schedule.work.matrices, strict=True):
            whole = name.partition("[")[0].removeprefix("module.")
            costs[whole] += iteration_cost(*work.compute.shape)
    return costs


def _by_ranks(
    chunk: Any, matrices: list[tuple[str, Tensor]]
) -> dict[int, list[tuple[str, Tensor]]]:
    """Return the matrices by how many ranks their buffers are cut over."""
    sizes = {
        param: buffer.data_parallel_group.size()
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        for param in buffer.params
    }
    found: dict[int, list[tuple[str, Tensor]]] = {}
    for name, param in matrices:
        found.setdefault(sizes[param], []).append((name, param))
    return found
