"""Muon refuses what it cannot do, and reads every parameter's own cut."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.muon import TensorParallelMuon
from tests.harness import run_ranks
from tests.unit.optimizers.parameters import parameter

EXACT = {"fp32_matmul_prec": "highest"}


def test_a_sharded_parameter_without_group_is_refused():
    param = parameter(4, 6)
    param.partition_dim = 0
    with pytest.raises(ConfigurationError, match=r"group 'tp'.*partition_dim 0"):
        TensorParallelMuon([param], tp_mode="auto").step()
    for attribute, value in (("partition_dim", -1), ("tensor_model_parallel", False)):
        param = parameter(4, 6)
        param.partition_dim = 0
        setattr(param, attribute, value)
        TensorParallelMuon([param], tp_mode="auto").step()


def mixed_cuts(mode):
    """Step parameters that are cut by rows, by columns and not at all; return errors."""
    rank, size = dist.get_rank(), dist.get_world_size()
    cuts = {"rows": ((12, 8), 0), "columns": ((8, 12), 1), "whole": ((6, 8), -1)}
    params, alone = {}, {}
    for seed, (name, (shape, dim)) in enumerate(cuts.items()):
        alone[name] = parameter(*shape, seed=seed)
        cut = [
            t if dim == -1 else t.chunk(size, dim)[rank].contiguous()
            for t in (alone[name].detach(), alone[name].grad)
        ]
        params[name] = torch.nn.Parameter(cut[0].clone())
        params[name].grad = cut[1].clone()
        params[name].partition_dim = dim
    groups = SimpleNamespace(tp=dist.group.WORLD)
    TensorParallelMuon(params.items(), 0.1, pg_collection=groups, tp_mode=mode, **EXACT).step()
    TensorParallelMuon(alone.items(), 0.1, **EXACT).step()
    errors = {}
    for name, (_, dim) in cuts.items():
        want = alone[name] if dim == -1 else alone[name].chunk(size, dim)[rank]
        errors[name] = ((params[name] - want).norm() / want.norm()).item()
    return errors


@pytest.mark.parametrize("mode", ["duplicated", "exchange", "distributed", "auto", "blockwise"])
def test_partition_dim_is_each_parameters_own(mode):
    for errors in run_ranks(2, mixed_cuts, mode):
        assert errors["whole"] == 0
        cut = [errors["rows"], errors["columns"]]
        if mode == "blockwise":
            assert min(cut) > 1e-3  # another update, as documented
        else:
            assert max(cut) < 2e-6  # the order of sums differs


@pytest.mark.parametrize(
    ("argument", "value"),
    [("lr", -1.0), ("momentum", 1.0), ("num_ns_steps", 0), ("tp_mode", "dupe"), ("ns_eps", 0.0)],
)
def test_values_that_would_train_something_else_are_refused(argument, value):
    with pytest.raises(ConfigurationError, match=repr(value)):
        TensorParallelMuon([parameter(4, 4)], **{argument: value})


def test_namo_refuses_l2_weight_decay():
    param = torch.nn.Parameter(torch.ones(4, 4))
    options = {"weight_decay_method": "l2"}
    with pytest.raises(ConfigurationError, match=r"moment2_method='namo'.*l2"):
        TensorParallelAdaptiveMuon([param], moment2_method="namo", **options)
    TensorParallelAdaptiveMuon([param], moment2_method="normuon", **options)
