"""What Muon does with each number, against plain float64 arithmetic."""

import pytest
import torch

from megatron_eopt.optimizers.muon_driver import (
    decay_rate,
    directions,
    gradients,
    shrink,
    subtract,
)

LR, DECAY, MOMENTUM = 0.1, 0.2, 0.9


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 4), (5,), (0,), (2, 3, 4)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def assert_lists_equal(got, want):
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def with_gradients(params, grads):
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


@pytest.mark.parametrize(
    ("method", "rate"), [("decoupled", LR * DECAY), ("independent", DECAY), ("l2", 0.0)]
)
def test_rate_of_decay(method, rate):
    assert decay_rate({"lr": LR, "weight_decay": DECAY}, method) == rate


@pytest.mark.parametrize("method", ["decoupled", "independent", "l2"])
def test_only_l2_adds_weights_to_new_gradients(method):
    params = with_gradients(tensors(0), grads := tensors(1))
    got = gradients(params, {"weight_decay": DECAY}, method)
    added = DECAY if method == "l2" else 0.0
    want = [g + added * p for p, g in zip(tensors(0), tensors(1), strict=True)]
    assert_lists_equal(got, want)
    assert_lists_equal(grads, tensors(1))
    assert_lists_equal(params, tensors(0))


@pytest.mark.parametrize("method", ["decoupled", "independent", "l2"])
def test_without_decay_gradients_are_used_as_they_are(method):
    params = with_gradients(tensors(0), grads := tensors(1))
    got = gradients(params, {"weight_decay": 0.0}, method)
    assert all(one is other for one, other in zip(got, grads, strict=True))
    assert gradients([], {"weight_decay": DECAY}, method) == []


def test_weights_shrink_by_a_part_of_themselves():
    params = tensors(0)
    shrink(params, DECAY)
    assert_lists_equal(params, [(1 - DECAY) * param for param in tensors(0)])
    shrink([], DECAY)


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


@pytest.mark.parametrize("rate", [0.0, DECAY])
def test_updates_are_subtracted_from_what_has_decayed(rate):
    params, updates = tensors(0), tensors(1)
    subtract({"lr": LR}, params, updates, rate)
    want = [(1 - rate) * p - LR * u for p, u in zip(tensors(0), tensors(1), strict=True)]
    assert_lists_equal(params, want)
    assert_lists_equal(updates, tensors(1))


def test_directions_and_updates_may_be_narrower():
    grads, momenta, params = ([tensor.float() for tensor in tensors(seed)] for seed in (1, 2, 0))
    exact = directions(grads, kept := [m.clone() for m in momenta], MOMENTUM, True)
    got = directions(grads, momenta, MOMENTUM, True, torch.bfloat16)
    assert_lists_equal(momenta, kept)
    for one, other in zip(got, exact, strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, other.bfloat16())
    want = [p - LR * u.float() for p, u in zip(params, got, strict=True)]
    subtract({"lr": LR}, params, got)
    assert_lists_equal(params, want)


def test_directions_of_narrow_gradients_stay_as_narrow():
    (got,) = directions(
        [torch.ones(3, dtype=torch.bfloat16)],
        [torch.zeros(3, dtype=torch.bfloat16)],
        MOMENTUM,
        True,
        torch.float32,
    )
    assert got.dtype == torch.bfloat16


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("dtype", "fits"),
    [(None, [False, True, False, False]), (torch.bfloat16, [True, False, False, False])],
)
def test_directions_lie_at_their_places_where_these_fit(nesterov, dtype, fits):
    grads, momenta = ([tensor.float() for tensor in tensors(seed)] for seed in (1, 2))
    exact = directions(grads, kept := [m.clone() for m in momenta], MOMENTUM, nesterov)
    places = [
        torch.empty(12, dtype=torch.bfloat16),
        torch.empty(5),
        None,
        torch.empty(25),  # too long
    ]
    got = directions(grads, momenta, MOMENTUM, nesterov, dtype, places)
    assert_lists_equal(momenta, kept)
    at_place = [
        p is not None and g.data_ptr() == p.data_ptr() for g, p in zip(got, places, strict=True)
    ]
    assert at_place == fits
    assert_lists_equal(
        [g.to(dtype or g.dtype) for g in got], [g.to(dtype or g.dtype) for g in exact]
    )


def test_narrower_updates_are_added_as_they_are():
    params, updates = ([tensor.float() for tensor in tensors(seed)] for seed in (0, 1))
    narrow = [update.bfloat16() for update in updates]
    want = [p - LR * u.float() for p, u in zip(params, narrow, strict=True)]
    subtract({"lr": LR}, params, narrow)
    assert_lists_equal(params, want)


def test_wider_updates_are_rounded_first():
    params = [tensor.bfloat16() for tensor in tensors(0)]
    updates = [tensor.float() for tensor in tensors(1)]
    want = [p.clone().add_(u.bfloat16(), alpha=-LR) for p, u in zip(params, updates, strict=True)]
    subtract({"lr": LR}, params, updates)
    assert all(map(torch.equal, params, want))
