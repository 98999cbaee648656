"""Loads of the ranks by this package's assignment and by megatron-core's layout function."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.layer_wise_optimizer import (
    LayerWiseDistributedOptimizer,
    tag_params_for_buffer_routing,
)
from torch import nn

from benchmarks.balance.bound import lower_bound
from benchmarks.model_shapes import Shape
from megatron_eopt.layouts import assign_owners, iteration_cost

__all__ = ["WORLD_SIZES", "Padded", "Row", "measure"]

WORLD_SIZES = tuple(2**k for k in range(3, 13))

type Costs = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Padded:
    """What megatron-core's layout function gives.

    Attributes:
        padding: Buffer elements over parameter elements.
        imbalance: Largest load over the mean load.
    """

    padding: float
    imbalance: float


@dataclass(frozen=True)
class Row:
    """One model at one number of ranks; loads are costs of Newton-Schulz iterations.

    Attributes:
        world_size: Ranks.
        over_simple: Our largest load over max(mean, largest matrix, equal units per rank rounded
            up).
        over_proved: Our largest load over the bound that the bin packing argument proves.
        imbalance: Our largest load over the mean load.
        one_bucket: megatron-core's layout without overlap of the gradient reduction.
        buckets: The same with overlap, at the trainer's default bucket size.
    """

    world_size: int
    over_simple: float
    over_proved: float
    imbalance: float
    one_bucket: Padded
    buckets: Padded


def simple_bound(costs: Costs, world_size: int) -> float:
    """Return max(mean, largest unit, for equal units their number a rank, rounded up)."""
    units, counts = np.unique(costs, return_counts=True)
    packed = (units * np.ceil(counts / world_size)).max()
    return float(max(costs.sum() / world_size, costs.max(), packed))


def measure(shapes: list[Shape], world_size: int) -> Row:
    """Deal out matrices of these shapes by either package."""
    costs = np.array([iteration_cost(*shape) for shape in shapes])
    owners = assign_owners(costs, world_size)
    most = np.bincount(owners, weights=costs, minlength=world_size).max()
    return Row(
        world_size,
        over_simple=float(most / simple_bound(costs, world_size)),
        over_proved=float(most / lower_bound(costs, world_size)),
        imbalance=float(most / costs.mean() / len(costs) * world_size),
        one_bucket=_padded(shapes, costs, world_size, None),
        # the trainer's default with overlap of the gradient reduction
        buckets=_padded(shapes, costs, world_size, max(40_000_000, 1_000_000 * world_size)),
    )


def _padded(shapes: list[Shape], costs: Costs, world_size: int, bucket_size: int | None) -> Padded:
    """Run megatron-core's layout function on matrices without storage, and read it."""
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
    return Padded(layout.bucket_indices[-1][1] / elements, float(loads.max() / loads.mean()))
