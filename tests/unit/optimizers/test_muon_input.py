"""Muon refuses what it cannot do, and reads every parameter's own cut."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.math.moments import MOMENT2_METHODS
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.muon import TensorParallelMuon
from tests.harness import run_ranks
from tests.unit.optimizers.parameters import parameter

EXACT = {"fp32_matmul_prec": "highest"}
QKV = [8, 4, 4]


@pytest.mark.parametrize("value", ["rows", 2, -2])
def test_an_unknown_partition_dim_is_refused(value):
    param = parameter(4, 6)
    param.partition_dim = value
    with pytest.raises(ConfigurationError, match="partition_dim"):
        TensorParallelMuon([param]).step()


@pytest.mark.parametrize("mode", ["duplicated", "distributed", "exchange", "auto"])
@pytest.mark.parametrize("collection", [None, SimpleNamespace(tp=None)])
def test_a_sharded_parameter_without_group_is_refused(mode, collection):
    param = parameter(4, 6)
    param.partition_dim = 0
    with pytest.raises(ConfigurationError, match=r"group 'tp'.*partition_dim 0"):
        TensorParallelMuon([param], pg_collection=collection, tp_mode=mode).step()
    for attribute, value in (("partition_dim", -1), ("tensor_model_parallel", False)):
        param = parameter(4, 6)
        param.partition_dim = 0
        setattr(param, attribute, value)
        TensorParallelMuon([param], pg_collection=collection, tp_mode=mode).step()


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
    ("argument", "value", "error"),
    [
        ("lr", -1.0, ConfigurationError),
        ("momentum", 1.0, ConfigurationError),
        ("momentum", -0.1, ConfigurationError),
        ("weight_decay", float("nan"), ConfigurationError),
        ("weight_decay_method", "L2", ConfigurationError),
        ("fp32_matmul_prec", "low", ConfigurationError),
        ("coefficient_type", "quintics", ConfigurationError),
        ("num_ns_steps", 0, ConfigurationError),
        ("scale_mode", "spectrall", ConfigurationError),
        ("extra_scale_factor", 0.0, ConfigurationError),
        ("tp_mode", "dupe", ConfigurationError),
        ("algorithm", "grams", ConfigurationError),
        ("backend", "torchh", ConfigurationError),
        ("ns_eps", 0.0, ConfigurationError),
        ("momentum_dtype", "fp4", ConfigurationError),
    ],
)
def test_values_that_would_train_something_else_are_refused(argument, value, error):
    with pytest.raises(error) as caught:
        TensorParallelMuon([parameter(4, 4)], **{argument: value})
    assert repr(value) in str(caught.value)


def test_what_is_no_matrix_is_refused():
    with pytest.raises(ConfigurationError, match=r"shape=\(4,\)"):
        TensorParallelMuon([torch.nn.Parameter(torch.zeros(4))]).step()


@pytest.mark.parametrize(
    "options", [{"use_decoupled_weight_decay": False}, {"weight_decay_method": "l2"}]
)
def test_namo_refuses_l2_weight_decay(options):
    param = torch.nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ConfigurationError, match=r"moment2_method='namo'.*l2"):
        TensorParallelAdaptiveMuon([param], moment2_method="namo", **options)
    TensorParallelAdaptiveMuon([param], moment2_method="normuon", **options)


@pytest.mark.parametrize("size", [0.0, 1e-4, 1.0])
@pytest.mark.parametrize("method", MOMENT2_METHODS)
def test_float16_parameters_stay_finite(method, size):
    """In float16 eps is 0, as are the squares of small updates."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(16, 32, generator=generator).half()
    param, exact = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    grad = size * torch.randn(16, 32, generator=generator)
    for one in (param, exact):
        one.grad = grad.to(one.dtype)
        TensorParallelAdaptiveMuon([one], lr=0.01, moment2_method=method).step()
    assert param.isfinite().all()
    if size == 1.0:
        # eleven bits of weights up to 4; products are in bfloat16
        torch.testing.assert_close(param.float(), exact, rtol=1e-3, atol=4e-3)
