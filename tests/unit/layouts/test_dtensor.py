"""DTensor layouts against the shards that torch itself makes."""

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.layouts import dtensor_layout
from megatron_eopt.layouts.dtensor import block_layout
from tests.harness.each_rank import on_ranks
from tests.unit.layouts.strategies import check, store

CASES = [
    ((4,), (5, 3), [Shard(0)]),
    ((4,), (3, 7), [Shard(1)]),
    ((4,), (9, 2), [Shard(0)]),  # torch.chunk: 3, 3, 3, 0
    ((4,), (5, 4, 3), [Shard(0)]),
    ((4,), (2, 6, 3), [Shard(1)]),
    ((4,), (2, 3, 6), [Shard(-1)]),
    ((2, 2), (5, 3), [Replicate(), Shard(0)]),
    ((2, 2), (5, 3), [Shard(0), Replicate()]),
    ((2, 2), (5, 7), [Shard(0), Shard(1)]),
    ((2, 2), (7, 3), [Shard(0), Shard(0)]),
    ((2, 2), (3, 3), [Replicate(), Replicate()]),
    ((2, 2), (3, 5, 3), [Shard(0), Shard(1)]),
]


@on_ranks(4)
def test_layouts_equal_torchs_shards():
    rank = torch.distributed.get_rank()
    for mesh_shape, shape, placements in CASES:
        mesh = init_device_mesh("cpu", mesh_shape)
        full = torch.arange(float(np.prod(shape))).view(shape)
        check_local(distribute_tensor(full, mesh, placements), full, rank)
    # FSDP over tensor parallelism
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for placement in (Shard(0), Shard(1)):
        linear = torch.nn.Linear(5, 10, bias=False)
        full = torch.arange(50.0).view(10, 5)
        sharded = distribute_tensor(full, mesh["tp"], [placement])
        linear.weight = torch.nn.Parameter(sharded)
        fully_shard(linear, mesh=mesh["dp"])
        assert isinstance(linear.weight, DTensor)
        check_local(linear.weight.detach(), full, rank)


def check_local(tensor, full, rank):
    mesh = tensor.device_mesh.mesh.numpy().astype(np.int64)
    layout = dtensor_layout(tuple(full.shape), mesh, tensor.placements)
    check(layout, 4)
    local = tensor.to_local().flatten()
    assert torch.equal(store(layout, full.reshape(layout.shape), 4)[rank], local)


def test_one_expert_of_many():
    layout = dtensor_layout((4, 2, 3), np.arange(2), [Shard(0)])
    expert = layout.select_rows(3 * 2, 2)
    assert expert.boxes.rank.tolist() == [1]
    assert expert.boxes.offset.tolist() == [6]


def test_a_partial_tensor_is_refused():
    with pytest.raises(ConfigurationError, match=r"w=.*Partial.* must be Shard or Replicate"):
        dtensor_layout((4, 4), np.arange(2), [Partial()], name="w")


def test_a_cut_kernel_of_a_convolution_is_refused():
    low, high = np.array([[0, 0, 0], [0, 0, 2]]), np.array([[4, 2, 2], [4, 2, 3]])
    with pytest.raises(ConfigurationError, match=r"w=\(4, 2, 3\): is a convolution whose kernel"):
        block_layout((4, 2, 3), low, high, np.arange(2), np.ones(2, bool), cols=6, name="w")
