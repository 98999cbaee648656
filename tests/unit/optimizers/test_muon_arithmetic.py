"""What Muon does with each number, against plain float64 arithmetic."""

import pytest
import torch

from megatron_eopt.optimizers.muon_driver import decayed, directions, subtract

LR, DECAY, MOMENTUM = 0.1, 0.2, 0.9


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 4), (5,), (0,), (2, 3, 4)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def decay(params, grads, rate, method):
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return decayed(params, {"lr": LR, "weight_decay": rate}, method)


def assert_lists_equal(got, want):
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("method", "factor"), [("decoupled", 1 - LR * DECAY), ("independent", 0.8)]
)
def test_decay_of_weights_leaves_gradients_alone(method, factor):
    params, grads = tensors(0), tensors(1)
    got = decay(params, grads, DECAY, method)
    assert_lists_equal(got, tensors(1))
    assert_lists_equal(params, [factor * param for param in tensors(0)])


def test_l2_adds_to_new_gradients():
    params, grads = tensors(0), tensors(1)
    got = decay(params, grads, DECAY, "l2")
    want = [g + DECAY * p for p, g in zip(tensors(0), tensors(1), strict=True)]
    assert_lists_equal(got, want)
    assert_lists_equal(grads, tensors(1))
    assert_lists_equal(params, tensors(0))


@pytest.mark.parametrize("method", ["decoupled", "independent", "l2"])
def test_no_decay_changes_nothing(method):
    params, grads = tensors(0), tensors(1)
    got = decay(params, grads, 0.0, method)
    assert all(one is other for one, other in zip(got, grads, strict=True))
    assert_lists_equal(params, tensors(0))
    assert decay([], [], DECAY, method) == []


@pytest.mark.parametrize("nesterov", [False, True])
def test_directions_follow_the_moving_average(nesterov):
    grads, momenta = tensors(1), tensors(2)
    got = directions(grads, momenta, MOMENTUM, nesterov)
    new = [MOMENTUM * m + (1 - MOMENTUM) * g for m, g in zip(tensors(2), tensors(1), strict=True)]
    mixed = [MOMENTUM * m + (1 - MOMENTUM) * g for m, g in zip(new, tensors(1), strict=True)]
    assert_lists_equal(momenta, new)
    assert_lists_equal(got, mixed if nesterov else new)
    assert_lists_equal(grads, tensors(1))
    assert directions([], [], MOMENTUM, nesterov) == []


def test_updates_are_subtracted():
    params, updates = tensors(0), tensors(1)
    subtract({"lr": LR}, params, updates)
    want = [p - LR * u for p, u in zip(tensors(0), tensors(1), strict=True)]
    assert_lists_equal(params, want)
    assert_lists_equal(updates, tensors(1))
