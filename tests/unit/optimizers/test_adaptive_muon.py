"""Adaptive Muon against float64, emerging-optimizers' class, and itself over two ranks."""

import copy

import numpy as np
import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import AdaptiveMuon

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.math.moments import normuon_
from megatron_eopt.matrices import gated
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from tests.reference.adaptive_muon import AdaptiveReference

METHODS = ["adamuon", "normuon", "namo"]
QKV = [8, 4, 4]
# name: shape, fused
SHAPES = {
    "tall": ((24, 16), False),
    "wide": ((16, 24), False),
    "square": ((16, 16), False),
    # Q is 32 x 24 and scaled by another factor than K and V, 16 x 24 each
    "qkv": ((64, 24), True),
    "one query group": ((16, 24), True),
}


def qkv_rows(rows):
    groups = np.arange(rows).reshape(-1, sum(QKV))
    return [part.ravel() for part in np.split(groups, np.cumsum(QKV)[:-1], axis=1)]


def values(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {n: scale * torch.randn(s, generator=generator) for n, (s, _) in SHAPES.items()}


def build(method, **options):
    params = []
    for name, value in values(0).items():
        param = torch.nn.Parameter(value)
        param.is_qkv = SHAPES[name][1]
        params.append((name, param))
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "moment2_method": method}
    settings |= {"fp32_matmul_prec": "highest", "split_qkv": True, "qkv_split_shapes": QKV}
    return TensorParallelAdaptiveMuon(params, **(settings | options)), dict(params)


LATE = {"wide": 2, "qkv": 1}
"""The first step in which a parameter has a gradient, so that counts of steps differ."""


def run_steps(optimizer, params, steps, late=None):
    """Step with gradients that shrink, so that running norms matter."""
    for step in range(steps):
        grads = values(step + 1, scale=0.5**step)
        for name, param in params.items():
            param.grad = grads[name] if step >= (late or {}).get(name, 0) else None
        optimizer.step()


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_five_steps_equal_the_float64_reference(method, bias_correction):
    optimizer, params = build(method, bias_correction=bias_correction)
    run_steps(optimizer, params, 5, LATE)
    for name, (shape, fused) in SHAPES.items():
        start = values(0)[name].numpy()
        parts = qkv_rows(shape[0]) if fused else None
        reference = AdaptiveReference(start, method, parts, bias_correction=bias_correction)
        for step in range(LATE.get(name, 0), 5):
            reference.step(values(step + 1, scale=0.5**step)[name].numpy())
        after = params[name].detach().double().numpy()
        error = np.linalg.norm(after - reference.weight) / np.linalg.norm(reference.weight - start)
        # relative to the way gone; float32 iterations amplify rounding in small singular values
        assert error < 2e-5, name


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
    pairs = zip(optimizers, (ours, theirs), strict=True)
    moments = [optimizer.state[param]["moment2_buffer"] for optimizer, param in pairs]
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


# updates are float32 where momentum is rounded
@pytest.mark.parametrize("momentum_dtype", ["fp32", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", METHODS)
def test_16_bit_parameters_stay_finite_and_keep_their_dtype(method, dtype, momentum_dtype):
    """In float16 eps is 0, as are the squares of small updates."""
    generator = torch.Generator().manual_seed(0)
    for size in (0.0, 1e-4, 1.0):
        start = torch.randn(16, 32, generator=generator).to(dtype)
        param, exact = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
        grad = size * torch.randn(16, 32, generator=generator)
        for one, kept in ((param, momentum_dtype), (exact, "fp32")):
            one.grad = grad.to(one.dtype)
            options = {"moment2_method": method, "momentum_dtype": kept}
            optimizer = TensorParallelAdaptiveMuon([one], lr=0.2, **options)
            optimizer.step()
            assert optimizer.state[one]["moment2_buffer"].dtype == one.dtype
        assert param.isfinite().all()
    # eight bits of weights and of products; AdaMuon gives the smallest entries full length
    assert (param - exact).norm() < 0.15 * (exact - start).norm()


def test_namo_refuses_l2_weight_decay():
    with pytest.raises(ConfigurationError, match=r"moment2_method='namo'.*l2"):
        build("namo", weight_decay_method="l2")


@pytest.mark.parametrize("columns", [slice(2), slice(2, 6)])
def test_a_part_of_a_square_matrix_gets_what_the_whole_one_gets(columns):
    """Its rows are summed over the ranks that share them, and give the norms of all of it."""
    update, moment2 = torch.randn(1, 6, 6), torch.rand(1, 6, 1)
    part, of_part = update[..., columns].clone(), moment2.clone()
    others = update.square().sum(-1, keepdim=True) - part.square().sum(-1, keepdim=True)
    normuon_(update, moment2, 0.9, 1e-8, 1.0, shape=(6, 6))
    normuon_(part, of_part, 0.9, 1e-8, 1.0, shape=(6, 6), reduce=others.add)
    torch.testing.assert_close(of_part, moment2)
    torch.testing.assert_close(part, update[..., columns])
