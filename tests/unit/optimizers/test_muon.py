"""TensorParallelMuon: its arithmetic against float64, and its contract."""

import copy
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon as EmergingMuon

from benchmarks.gpu_check.sections.reference import deviations
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.matrices import qkv, transposed, whole
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.exchange import ExchangeConfig
from megatron_eopt.optimizers.muon import _NOT_CALLED, TensorParallelMuon
from megatron_eopt.optimizers.specs import refuse_own_step
from tests.harness import run_ranks
from tests.reference.muon import muon_step
from tests.unit.optimizers.parameters import parameter

EXACT = {"fp32_matmul_prec": "highest"}
QKV = [8, 4, 4]


def matrix(tensor):
    return tensor.detach().double().numpy().copy()


def relative(got, want, start):
    return np.linalg.norm(matrix(got) - want) / np.linalg.norm(want - start)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("method", ["decoupled", "l2", "independent"])
def test_three_steps_equal_float64_for_each_kind_of_weight_decay(method, nesterov):
    param = parameter(12, 20)
    how = {"weight_decay_method": method, **EXACT}
    optimizer = TensorParallelMuon([param], 0.02, 0.9, nesterov, 0.1, **how)
    start = weight = matrix(param)
    momentum = np.zeros_like(weight)
    for step in range(3):
        param.grad = parameter(12, 20, seed=step).grad
        grad = matrix(param.grad)
        optimizer.step()
        decayed = {"decoupled": 1 - 0.02 * 0.1, "l2": 1, "independent": 1 - 0.1}[method] * weight
        effective = grad + 0.1 * weight if method == "l2" else grad
        numbers = {"lr": 0.02, "momentum": 0.9, "nesterov": nesterov}
        weight, momentum = muon_step(decayed, effective, momentum, **numbers)
        assert np.array_equal(matrix(param.grad), grad)
    # relative to the way gone: float32 iterations amplify rounding in small singular values
    assert relative(param, weight, start) < 1e-5
    buffer = optimizer.state[param]["momentum_buffer"]
    np.testing.assert_allclose(matrix(buffer), momentum, rtol=1e-5, atol=1e-6)


def test_the_old_switch_means_l2():
    params = [parameter(6, 8), parameter(6, 8)]
    TensorParallelMuon([params[0]], use_decoupled_weight_decay=False, weight_decay=0.5).step()
    TensorParallelMuon([params[1]], weight_decay_method="l2", weight_decay=0.5).step()
    assert torch.equal(*params)


@pytest.mark.parametrize("shape", [(32, 128), (128, 32), (48, 48)])
@pytest.mark.parametrize("nesterov", [False, True])
def test_equals_emerging_optimizers_on_a_plain_matrix(shape, nesterov):
    ours, theirs = parameter(*shape), parameter(*shape)
    # both with the standard iteration: Gram's rounding is another one
    options = {"nesterov": nesterov, "weight_decay": 0.1, **EXACT}
    optimizers = (
        TensorParallelMuon([ours], 0.01, 0.9, algorithm="standard", **options),
        EmergingMuon([theirs], 0.01, 0.9, **options),
    )
    for step in range(3):
        for param, optimizer in zip((ours, theirs), optimizers, strict=True):
            param.grad = parameter(*shape, seed=step).grad
            optimizer.step()
    assert (ours - theirs).norm() / theirs.norm() < 1e-6


def test_closures_run_with_gradients_and_their_loss_is_returned():
    param = parameter(4, 6, grad=False)
    optimizer = TensorParallelMuon([param])

    def closure():
        assert torch.is_grad_enabled()
        loss = param.square().sum()
        loss.backward()
        return loss

    expected = param.square().sum().item()
    assert optimizer.step(closure).item() == pytest.approx(expected)
    assert TensorParallelMuon([param]).step() is None


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (2, 4, 6)])
def test_updates_never_alias_momentum_or_gradients(shape, nesterov):
    param = parameter(*shape)
    grad = param.grad.clone()
    optimizer = TensorParallelMuon([param], momentum=0.5, nesterov=nesterov)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], 0.5 * grad)
    optimizer.orthogonalize(param, param.grad).fill_(7.0)
    assert torch.equal(param.grad, grad)


def test_a_step_that_the_device_skips_changes_nothing_and_does_not_count():
    param = parameter(8, 6)
    optimizer = TensorParallelMuon([param], momentum_dtype="bf16")  # its noise follows a count
    optimizer.step()
    before, weight = copy.deepcopy(optimizer.state[param]), param.detach().clone()
    assert int(before["step"]) == 1
    for rule in optimizer._rules():
        rule.scale_gradients(torch.tensor(math.nan))
        rule.step(optimizer.param_groups, optimizer.state)
    assert torch.equal(param, weight)
    for key, value in before.items():
        now = torch.as_tensor(optimizer.state[param][key])
        assert torch.equal(now, torch.as_tensor(value)), key


def test_state_can_exist_before_the_first_step():
    first, late = parameter(4, 6), parameter(6, 4, grad=False)
    optimizer = TensorParallelMuon([first])
    optimizer.add_param_group({"params": [late], "lr": 0.5})
    assert not optimizer.state
    optimizer._init_group(optimizer.param_groups[0], skip_non_grad_params=False)
    for param in (first, late):
        assert list(optimizer.state[param]) == ["momentum_buffer"]
        assert torch.equal(optimizer.state[param]["momentum_buffer"], torch.zeros_like(param))
    before = late.detach().clone()
    optimizer.step()
    assert torch.equal(late, before)  # no gradient, no step


def test_groups_step_with_their_own_settings():
    together = [parameter(6, 8), parameter(6, 8, seed=1)]
    settings = [{"lr": 0.1, "momentum": 0.5}, {"lr": 0.2, "weight_decay": 0.3}]
    groups = [{"params": [p], **s} for p, s in zip(together, settings, strict=True)]
    TensorParallelMuon(groups, batched=False).step()
    for seed, (param, setting) in enumerate(zip(together, settings, strict=True)):
        alone = parameter(6, 8, seed=seed)
        TensorParallelMuon([alone], **setting).step()
        assert torch.equal(param, alone)


@pytest.mark.parametrize("declared", ["constructor", "parameter", "splits", "whole"])
def test_fused_qkv_equals_the_reference_part_by_part(declared):
    param = parameter(48, 20)
    param.is_qkv = True
    options = {"split_qkv": True, "qkv_split_shapes": QKV}
    if declared == "parameter":
        param.qkv_split_shapes, options["qkv_split_shapes"] = QKV, [1, 1, 1]
    if declared == "splits":
        options = {"splits": {param: qkv((48, 20), QKV)}}
    if declared == "whole":
        param.eopt_split = "whole"
    start, grad = matrix(param), matrix(param.grad)
    TensorParallelMuon([param], 0.1, 0.9, weight_decay=0.1, **options, **EXACT).step()
    groups = np.arange(48).reshape(-1, 16)
    parts = [part.ravel() for part in np.split(groups, [8, 12], axis=1)]
    parts = [np.arange(48)] if declared == "whole" else parts
    want, _ = muon_step(start, grad, 0 * grad, lr=0.1, momentum=0.9, weight_decay=0.1, parts=parts)
    assert relative(param, want, start) < 1e-5


def test_rows_of_a_fused_weight_must_be_given():
    param = parameter(48, 20)
    param.is_qkv = True
    with pytest.raises(ConfigurationError, match=r"qkv_split_shapes=None: must give the layout"):
        TensorParallelMuon([param], split_qkv=True, qkv_split_shapes=None).step()


def test_experts_are_matrices_of_their_own():
    param = parameter(3, 8, 12)
    start, grad = matrix(param), matrix(param.grad)
    TensorParallelMuon([param], 0.1, 0.9, weight_decay=0.1, **EXACT).step()
    for i in range(3):
        want, _ = muon_step(start[i], grad[i], 0 * grad[i], lr=0.1, momentum=0.9, weight_decay=0.1)
        assert relative(param[i], want, start[i]) < 1e-5


@pytest.mark.parametrize("kind", [TensorParallelMuon, TensorParallelAdaptiveMuon])
@pytest.mark.parametrize("name", _NOT_CALLED)
def test_an_override_that_no_step_calls_is_refused(kind, name):
    own = type("Own", (kind,), {name: lambda *_: None})
    with pytest.raises(ConfigurationError, match=r"no step calls it.*update_rule_class"):
        own([parameter(4, 6)])


def test_hooks_that_torch_puts_around_the_first_instances_step_change_no_class():
    """They are put around the step of a class of which no base has had an instance."""

    class Same(TensorParallelMuon):
        pass

    class Own(TensorParallelMuon):
        def step(self, closure=None):
            return super().step(closure)

    for cls, in_pieces in ((Same, True), (Own, False)):
        step = getattr(cls.step, "__wrapped__", cls.step)
        cls.step = torch.optim.Optimizer.profile_hook_step(step)
        cls.step.hooked = True
        assert cls.steps_in_pieces() == in_pieces
        told = pytest.raises(ConfigurationError, match="has a step of its own")
        with nullcontext() if in_pieces else told:
            refuse_own_step(cls([parameter(4, 6)]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_step_in_their_own(dtype):
    exact = parameter(8, 12)
    param = torch.nn.Parameter(exact.detach().to(dtype))
    param.grad = exact.grad.to(dtype)
    optimizer = TensorParallelMuon([param], lr=0.1)
    optimizer.step()
    TensorParallelMuon([exact], lr=0.1).step()
    assert param.dtype == optimizer.state[param]["momentum_buffer"].dtype == dtype
    # the iteration multiplies in bfloat16 (medium), weights have 8 bits of mantissa at least
    torch.testing.assert_close(param.float(), exact.detach(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", [TensorParallelMuon, TensorParallelAdaptiveMuon])
def test_any_storage_takes_the_optimizers_own_size_of_waves(kind):
    params = [torch.nn.Parameter(torch.randn(64, 64)) for _ in range(4)]
    shards = kind(params)._shards()
    two_matrices = 2 * 64 * 64 * 4 / 2**20
    for matrix_buffer_mb, count in [(two_matrices, 2), (2 * two_matrices, 1)]:
        muon = kind(params, matrix_buffer_mb=matrix_buffer_mb, fp32_matmul_prec="highest")
        given = ExchangeConfig("exchange", matrix_buffer_mb=1024)
        update_rule = muon.update_rule_over(shards, given)
        assert len(update_rule.exchange.waves) == count


# Relative to the step taken. Five float32 iterations amplify rounding errors by the slope at zero,
# up to 1e3 for the smallest singular values: 1e-5 leaves a margin of 2, and 0.25 of bfloat16, too.
TOLERANCES = {"fp32": 1e-5, "bf16": 0.25}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_step_through_megatron_equals_float64(ranks, dtype):
    """Of its model, DDP, schedule and factory."""
    for errors in run_ranks(ranks, deviations, dtype):
        assert len(errors) > 8
        for name, error in errors.items():
            assert error < TOLERANCES[dtype], name


def test_a_weight_that_is_stored_transposed_alone():
    plain, turned = parameter(12, 8), parameter(8, 12)
    turned.eopt_split = transposed(whole((12, 8)))
    grad, optimizer = plain.grad, TensorParallelMuon([plain, turned], **EXACT)
    found, want = optimizer.orthogonalize(turned, grad.mT), optimizer.orthogonalize(plain, grad)
    assert (found.mT - want).norm() < 1e-5 * want.norm()
