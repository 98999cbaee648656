"""Adaptive Muon against float64, emerging-optimizers' class, and itself over two ranks."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import AdaptiveMuon

from megatron_eopt.matrices import gated
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from tests.harness import run_ranks
from tests.reference.adaptive_muon import AdaptiveReference

METHODS = ["adamuon", "normuon", "namo"]
QKV = [8, 4, 4]
# name: whole shape, partition_dim, fused
SHAPES = {
    "column": ((24, 16), 0, False),
    "row": ((16, 24), 1, False),
    "square": ((16, 16), 0, False),
    "square by columns": ((16, 16), 1, False),
    "tall by columns": ((40, 8), 1, False),
    "replicated": ((12, 8), -1, False),
    # Q is 32 x 24 and scaled by another factor than K and V, 16 x 24 each
    "qkv": ((64, 24), 0, True),
    # the first of two ranks stores all of Q and the second K and V
    "one query group": ((16, 24), 0, True),
}


def qkv_rows(rows):
    groups = np.arange(rows).reshape(-1, sum(QKV))
    return [part.ravel() for part in np.split(groups, np.cumsum(QKV)[:-1], axis=1)]


def values(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {n: scale * torch.randn(s, generator=generator) for n, (s, _, _) in SHAPES.items()}


def local(tensors, rank, size):
    cut = {}
    for name, tensor in tensors.items():
        dim = SHAPES[name][1]
        cut[name] = tensor if dim == -1 or size == 1 else tensor.chunk(size, dim)[rank].contiguous()
    return cut


def build(method, rank=0, size=1, group=None, **options):
    params = []
    for name, value in local(values(0), rank, size).items():
        param = torch.nn.Parameter(value.clone())
        if size > 1:
            param.partition_dim = SHAPES[name][1]
        param.is_qkv = SHAPES[name][2]
        params.append((name, param))
    settings = {
        "lr": 0.02,
        "momentum": 0.9,
        "weight_decay": 0.1,
        "fp32_matmul_prec": "highest",
        "split_qkv": True,
        "qkv_split_shapes": QKV,
        "pg_collection": SimpleNamespace(tp=group),
        "moment2_method": method,
    }
    return TensorParallelAdaptiveMuon(params, **(settings | options)), dict(params)


def run_steps(optimizer, params, steps, rank=0, size=1, without=()):
    """Step with gradients that shrink, so that running norms matter; ``without`` by step."""
    for step in range(steps):
        grads = local(values(step + 1, scale=0.5**step), rank, size)
        for name, param in params.items():
            absent = len(without) > step and name in without[step]
            param.grad = None if absent else grads[name]
        optimizer.step()


def whole_parameters(params, rank, size):
    """Gather slabs into whole parameters."""
    whole = {}
    for name, param in params.items():
        pieces = [torch.empty_like(param) for _ in range(size)]
        dist.all_gather(pieces, param.detach())
        dim = SHAPES[name][1]
        whole[name] = pieces[0] if dim == -1 else torch.cat(pieces, dim)
    return whole


# each alone against float64: batched and single products add in another order
@pytest.mark.parametrize(
    ("bias_correction", "batched"), [(False, True), (True, True), (False, False)]
)
@pytest.mark.parametrize("method", METHODS)
def test_five_steps_equal_the_float64_reference(method, bias_correction, batched):
    optimizer, params = build(method, bias_correction=bias_correction, batched=batched)
    run_steps(optimizer, params, 5)
    for name, (shape, _, fused) in SHAPES.items():
        start = values(0)[name].numpy()
        parts = qkv_rows(shape[0]) if fused else None
        reference = AdaptiveReference(start, method, parts, bias_correction=bias_correction)
        for step in range(5):
            reference.step(values(step + 1, scale=0.5**step)[name].numpy())
        after = params[name].detach().double().numpy()
        error = np.linalg.norm(after - reference.weight) / np.linalg.norm(reference.weight - start)
        # relative to the way gone; float32 iterations amplify rounding in small singular values
        assert error < 2e-5, name


def tensor_parallel_run(method, mode, without=(), wave_mb=64.0):
    rank, size = dist.get_rank(), dist.get_world_size()
    options = {"tp_mode": mode, "wave_mb": wave_mb}
    optimizer, params = build(method, rank, size, dist.group.WORLD, **options)
    run_steps(optimizer, params, 3, rank, size, without)
    moments = {name: optimizer.state[param]["moment2_buffer"] for name, param in params.items()}
    return whole_parameters(params, rank, size), moments


# 64 MiB are one wave in three of the modes; one matrix a wave
CASES = [
    (mode, mb) for mode in ("duplicated", "exchange", "distributed", "auto") for mb in (64, 1e-3)
]


def tensor_parallel_runs(method):
    return [tensor_parallel_run(method, mode, (), wave_mb) for mode, wave_mb in CASES]


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_equal_one_process(method):
    optimizer, params = build(method)
    run_steps(optimizer, params, 3)
    for results in run_ranks(2, tensor_parallel_runs, method):
        for case, (whole, moments) in zip(CASES, results, strict=True):
            for name, param in params.items():
                error = (whole[name] - param).norm() / param.norm()
                assert error < 2e-6, (case, name)
                if method != "adamuon":
                    mine = optimizer.state[param]["moment2_buffer"]
                    # squares of float32 factors, summed in another order
                    torch.testing.assert_close(moments[name], mine, rtol=2e-5, atol=1e-8)


def test_statistics_follow_a_matrix_that_changes_its_owner():
    """Which parameters step together decides who owns them; nobody may start from old numbers."""
    without = [(), ("qkv", "square"), ("column",)]
    optimizer, params = build("normuon")
    run_steps(optimizer, params, 3, without=without)
    for whole, _ in run_ranks(2, tensor_parallel_run, "normuon", "exchange", without):
        for name, param in params.items():
            assert (whole[name] - param).norm() / param.norm() < 2e-6, name


def blockwise_run(method):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = torch.randn(24, 16)
    sharded, alone = (torch.nn.Parameter(whole.chunk(size)[rank].clone()) for _ in range(2))
    sharded.partition_dim = 0
    for param, group in ((sharded, dist.group.WORLD), (alone, None)):
        optimizer = TensorParallelAdaptiveMuon(
            [param],
            pg_collection=SimpleNamespace(tp=group),
            tp_mode="blockwise",
            moment2_method=method,
        )
        for _ in range(2):
            param.grad = whole.chunk(size)[rank] + 1
            optimizer.step()
    return torch.equal(sharded, alone)


@pytest.mark.parametrize("method", METHODS)
def test_blockwise_treats_each_slab_as_a_matrix(method):
    assert run_ranks(2, blockwise_run, method) == [True, True]


@pytest.mark.parametrize("shape", [(32, 128), (128, 32), (32, 32)])
@pytest.mark.parametrize("method", METHODS)
def test_equals_emerging_optimizers_on_plain_matrices(method, shape):
    """So the scale is applied once: twice would be 2.26 times as long for 32 x 128 (NorMuon)."""
    torch.manual_seed(0)
    start = torch.randn(shape)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    common = {"moment2_method": method, "fp32_matmul_prec": "highest", "nesterov": True}
    optimizers = [
        TensorParallelAdaptiveMuon([ours], 0.01, 0.9, weight_decay=0.1, **common),
        AdaptiveMuon([theirs], 0.01, 0.9, 0.1, **common),
    ]
    for step in range(3):
        grad = torch.randn(shape) * 0.5**step
        for param, optimizer in zip((ours, theirs), optimizers, strict=True):
            param.grad = grad.clone()
            optimizer.step()
    assert (ours - theirs).norm() / (theirs - start).norm() < 1e-5
    moments = [
        o.state[p]["moment2_buffer"] for o, p in zip(optimizers, (ours, theirs), strict=True)
    ]
    assert moments[0].shape == moments[1].shape
    torch.testing.assert_close(*moments, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_state_can_exist_before_the_first_step_and_survives_a_round_trip(method, bias_correction):
    optimizer, params = build(method, bias_correction=bias_correction)
    optimizer._init_group(optimizer.param_groups[0], skip_non_grad_params=False)
    shapes = {n: {k: v.shape for k, v in optimizer.state[p].items()} for n, p in params.items()}
    keys = {"momentum_buffer", "moment2_buffer"} | ({"step"} if bias_correction else set())
    assert all(state.keys() == keys for state in shapes.values())
    run_steps(optimizer, params, 2)
    for name, param in params.items():
        assert shapes[name] == {k: v.shape for k, v in optimizer.state[param].items()}
    other, others = build(method, bias_correction=bias_correction)
    # what it has found out about its first state is not to outlive that
    run_steps(other, others, 1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for name, param in others.items():
        param.data.copy_(params[name])
    run_steps(optimizer, params, 2)
    run_steps(other, others, 2)
    for name, param in others.items():
        assert torch.equal(param, params[name])
        for key, value in other.state[param].items():
            assert torch.equal(value, optimizer.state[params[name]][key])


# NorMuon's eps is the smallest mean square: a larger one than that of orthogonal rows of 12
@pytest.mark.parametrize("own", [{"beta2": 0.5}, {"eps": 0.2}])
@pytest.mark.parametrize("method", METHODS)
def test_groups_have_their_own_beta2_and_eps(method, own):
    def step(groups, **options):
        params = [torch.nn.Parameter(torch.ones(8, 12)) for _ in range(2)]
        listed = [{"params": [p], **g} for p, g in zip(params, groups, strict=True)]
        optimizer = TensorParallelAdaptiveMuon(listed, moment2_method=method, **options)
        torch.manual_seed(0)
        for step in range(2):
            for param in params:
                param.grad = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        return [param.detach() for param in params]

    mixed = step([{}, own], beta2=0.9)
    first = step([{}, {}], beta2=0.9)[0]
    second = step([{}, {}], **({"beta2": 0.9} | own))[1]
    assert torch.equal(mixed[0], first)
    assert torch.equal(mixed[1], second)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("method", METHODS)
def test_experts_have_statistics_of_their_own(method):
    torch.manual_seed(0)
    stacked = torch.nn.Parameter(torch.randn(3, 8, 12))
    apart = [torch.nn.Parameter(matrix.clone()) for matrix in stacked.detach()]
    options = {"moment2_method": method, "fp32_matmul_prec": "highest"}
    one = TensorParallelAdaptiveMuon([stacked], **options)
    several = TensorParallelAdaptiveMuon(apart, **options)
    for _ in range(2):
        stacked.grad = torch.randn(3, 8, 12) * torch.tensor([1.0, 10.0, 0.1]).view(3, 1, 1)
        for param, grad in zip(apart, stacked.grad, strict=True):
            param.grad = grad.clone()
        one.step()
        several.step()
    torch.testing.assert_close(stacked, torch.stack(list(apart)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_zero_tiny_and_rank_deficient_gradients_are_finite(method):
    grads = [torch.zeros(8, 12), torch.full((8, 12), 1e-30), torch.ones(8, 12)]
    params = [torch.nn.Parameter(torch.ones(8, 12)) for _ in grads]
    optimizer = TensorParallelAdaptiveMuon(params, moment2_method=method)
    for _ in range(2):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    assert all(param.isfinite().all() for param in params)
    assert all(v.isfinite().all() for p in params for v in optimizer.state[p].values())


# updates are float32 where momentum is rounded
@pytest.mark.parametrize("momentum_dtype", ["fp32", "int8"])
@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_parameters_keep_their_dtype(method, momentum_dtype):
    param = torch.nn.Parameter(torch.ones(8, 12, dtype=torch.bfloat16))
    exact = torch.nn.Parameter(torch.ones(8, 12))
    settings = {"moment2_method": method, "momentum_dtype": momentum_dtype}
    optimizer = TensorParallelAdaptiveMuon([param], **settings)
    reference = TensorParallelAdaptiveMuon([exact], moment2_method=method)
    exact.grad = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    param.grad = exact.grad.to(torch.bfloat16)
    optimizer.step()
    reference.step()
    moment, its = (
        o.state[p]["moment2_buffer"] for o, p in ((optimizer, param), (reference, exact))
    )
    assert param.dtype == moment.dtype == torch.bfloat16
    # eight bits of mantissa
    torch.testing.assert_close(param.float(), exact, rtol=0.01, atol=0.003)
    # squares of factors that are computed in bfloat16
    assert (moment.float() - its).norm() < 0.05 * its.norm()


# with "medium", too, what both return is float32
@pytest.mark.parametrize("precision", ["highest", "medium"])
@pytest.mark.parametrize("method", METHODS)
def test_an_overridden_orthogonalize_is_normalized_and_scaled(method, precision):
    class Doubled(TensorParallelAdaptiveMuon):
        def orthogonalize(self, p, grad, **kwargs):
            return 2 * super().orthogonalize(p, grad, **kwargs)

    starts, params = [], []
    settings = {"weight_decay": 0.5, "moment2_method": method, "fp32_matmul_prec": precision}
    for cls in (TensorParallelAdaptiveMuon, Doubled):
        param = torch.nn.Parameter(torch.full((8, 12), 2.0))
        param.grad = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
        optimizer = cls([param], lr=1.0, **settings)
        optimizer.step()
        # without the half that decay leaves
        params.append(param.detach() - 1)
        starts.append(optimizer.state[param]["moment2_buffer"])
    # AdaMuon's update does not depend on its length, NorMuon and NAMO keep it
    factor = 1 if method == "adamuon" else 2
    # eps is not nothing beside AdaMuon's smallest entries
    torch.testing.assert_close(params[1], factor * params[0], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(starts[1], starts[0] * (1 if method == "namo" else 4))


@pytest.mark.parametrize("size", [1e-20, 1e20])
def test_namo_of_fused_weights_whose_squares_leave_float32(size):
    """Each of their matrices steps as it does alone."""
    grad = torch.randn(24, 16, generator=torch.Generator().manual_seed(7)) * size
    fused = torch.nn.Parameter(torch.ones(24, 16))
    alone = [torch.nn.Parameter(torch.ones(12, 16)) for _ in range(2)]
    settings = {"moment2_method": "namo", "fp32_matmul_prec": "highest"}
    fused.grad = grad.clone()
    TensorParallelAdaptiveMuon([fused], splits={fused: gated((24, 16))}, **settings).step()
    for param, its in zip(alone, grad.split(12), strict=True):
        param.grad = its.clone()
    TensorParallelAdaptiveMuon(alone, **settings).step()
    torch.testing.assert_close(fused, torch.cat(alone), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-4, 1.0])
@pytest.mark.parametrize("method", METHODS)
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
