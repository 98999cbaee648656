"""The passes of a step: Triton's kernels do to the bit what torch does."""

import math
import sys
from unittest import mock

import pytest
import torch
from torch.optim.adam import adam

from megatron_eopt.base import gpu
from megatron_eopt.math.passes import BLOCK, adam_, empty_sums, momentum_update_, update_
from tests.harness.kernels import interpreted_kernels

SIZES = ((5000,), (1,), (0,), (33,), (7, 11), (64, 32))
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
GRAD_SCALES = (None, 1.0, 0.3, math.nan)


def tensors(dtype, seed, sizes=SIZES):
    """Return tensors, or Nones for no dtype."""
    if dtype is None:
        return [None] * len(sizes)
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def factor(grad_scale):
    return None if grad_scale is None else torch.tensor(grad_scale)


def by_both(function, *args):
    """Return the tensors that a function has written, by kernels and by torch."""
    with interpreted_kernels():
        found = function(*args)
    return [[t for t in some if t is not None] for some in (found, function(*args))]


def mixed(grads, momenta, outs, grad_scale, momentum, nesterov, decay):
    kept, given = tensors(momenta, 1), tensors(grads, 2)
    places = [out if out is None else out.view(-1) for out in tensors(outs, 3)]
    lists = (kept, places, given, tensors(F32, 4))
    momentum_update_(*lists, factor(grad_scale), momentum, decay, nesterov=nesterov)
    assert all(map(torch.equal, given, tensors(grads, 2)))
    return [*kept, *places]


@pytest.mark.parametrize("grad_scale", GRAD_SCALES)
@pytest.mark.parametrize(
    "dtypes", [(F32, F32, BF16), (BF16, F32, F32), (BF16, BF16, BF16), (F32, F32, None)]
)
@pytest.mark.parametrize("momentum", [0.95, 0.3])
def test_mixing_has_the_bits_of_torch(momentum, dtypes, grad_scale):
    for nesterov, decay in ((True, 0.0), (True, 0.1), (False, 0.1)):
        found, expected = by_both(mixed, *dtypes, grad_scale, momentum, nesterov, decay)
        # without a place the momentum is all that is written
        assert len(found) == (1 + (dtypes[2] is not None)) * len(SIZES)
        assert all(map(torch.equal, found, expected))
        unwritten = grad_scale is not None and math.isnan(grad_scale)
        assert torch.equal(found[0], tensors(dtypes[1], 1)[0]) == unwritten


@pytest.mark.parametrize("nesterov", [False, True])
def test_mixing_sums_the_squares_of_rounded_directions(nesterov):
    momenta, grads, outs = tensors(F32, 1), tensors(F32, 2), tensors(BF16, 3)
    with interpreted_kernels():
        sums = list(map(empty_sums, outs))
        lists = (momenta, [out.view(-1) for out in outs], grads, momenta)
        momentum_update_(*lists, None, 0.95, nesterov=nesterov, sums=sums)
    assert empty_sums(outs[0]) is None
    for out, found in zip(outs, sums, strict=True):
        blocks = [block.double().square().sum() for block in out.view(-1).split(BLOCK)]
        assert len(found) == (len(blocks) if out.numel() else 0)
        if len(found):
            assert torch.equal(found, torch.stack(blocks))


def test_one_odd_tensor_narrows_no_launch_but_its_own():
    sizes = ((4096,), (1,), (64, 32))
    momenta, grads = tensors(F32, 1, sizes), tensors(F32, 2, sizes)
    kernel = mock.MagicMock()
    with interpreted_kernels():
        kernels = sys.modules["megatron_eopt.math.triton_passes"]
        with mock.patch.object(kernels, "momentum_update", kernel):
            momentum_update_(momenta, [None] * 3, grads, momenta, None, 0.9, nesterov=False)
    # how many tensors each launch has, and whether they are aligned
    launches = [call.args for call in kernel.__getitem__.return_value.call_args_list]
    assert sorted((args[2], args[-1]) for args in launches) == [(1, False), (2, True)]


def test_gradients_that_move_upload_addresses_alone():
    momenta = tensors(F32, 1, ((4096,),))
    with interpreted_kernels():
        tables = sys.modules["megatron_eopt.base.kernel_tables"]
        with mock.patch.object(gpu, "uploaded", side_effect=gpu.uploaded) as uploaded:
            kept = [tensors(F32, seed, ((4096,),)) for seed in range(3)]
            for grads in kept:
                momentum_update_(momenta, [None], grads, momenta, None, 0.9, nesterov=False)
            # two numbers for each program, once; a size and five addresses
            assert [c.args[0].size for c in uploaded.call_args_list] == [2 * 2, 6, 6, 6]
            assert tables.programs_of.cache_info().currsize == 1


def updated(weights, copies, updates, grad_scale, decay, cautious=False):
    kept, rounded = tensors(weights, 1), tensors(copies, 2)
    numbers = (factor(grad_scale), 0.02, decay)
    update_(kept, rounded, tensors(updates, 3), *numbers, cautious=cautious)
    return [*kept, *rounded]


@pytest.mark.parametrize("grad_scale", GRAD_SCALES)
@pytest.mark.parametrize(
    "dtypes", [(F32, BF16, BF16), (F32, F16, BF16), (F32, None, F32), (F32, None, BF16)]
)
def test_updating_has_the_bits_of_torch(dtypes, grad_scale):
    for decay, cautious in ((0.0, False), (0.1, False), (0.1, True)):
        found, expected = by_both(updated, *dtypes, grad_scale, decay, cautious)
        assert all(map(torch.equal, found, expected))
        weight, copy = found[0], found[-len(SIZES)]
        assert math.isnan(grad_scale or 0) or torch.equal(weight.to(copy.dtype), copy)


# the smallest product of two is below the range of their dtype
TINY = [(sign * size, other) for sign in (1, -1) for size in (1e-30, 2.0) for other in (1e-30, 2.0)]
TINY += [(0.0, 2.0), (2.0, 0.0), (-2.0, 0.0), (0.0, -2.0), (-2.0, -1e-30)]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_cautious_decay_compares_signs(dtype):
    def decayed(_):
        weight, update = (torch.tensor(side) for side in zip(*TINY, strict=True))
        # a learning rate of 0 leaves the decay alone
        update_([weight], [None], [update.to(dtype)], None, 0.0, 0.5, cautious=True)
        return [weight]

    wanted = [p * (0.5 if p == 0 or u == 0 or (p > 0) == (u > 0) else 1.0) for p, u in TINY]
    for (found,) in by_both(decayed, None):
        assert torch.equal(found, torch.tensor(wanted))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_updates_of_16_bit_weights_have_rates_in_32_bits(dtype):
    # which is what torch does on a GPU; on a CPU it rounds rates to 16 bits
    with interpreted_kernels():
        found = updated(dtype, None, BF16, None, 0.1)[: len(SIZES)]
    for value, weight, update in zip(found, tensors(dtype, 1), tensors(BF16, 3), strict=True):
        expected = weight
        for rate, change in ((0.1, weight), (0.02, update.to(dtype))):
            product = torch.tensor(rate).double() * change.double()
            expected = (expected.double() - product).float().to(dtype)
        assert torch.equal(value, expected)


def test_a_list_may_have_several_dtypes():
    def mixed_dtypes():
        lists = [tensors(F32, 1), tensors(BF16, 2), tensors(F32, 3)]
        lists[1][1::2] = tensors(F16, 2)[1::2]
        lists[2][::3] = tensors(BF16, 3)[::3]
        update_(*lists, None, 0.02, 0.1)
        return [*lists[0], *lists[1]]

    assert all(map(torch.equal, *by_both(mixed_dtypes)))


SETTINGS = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
FLAGS = {"amsgrad": False, "maximize": False}


def stepped(grad_scale, copies, decoupled, count, cautious=False):
    """Return weights, copies and moments after some steps of Adam, and how many there were."""
    weights, rounded = tensors(F32, 1), tensors(copies, 2)
    moments = [[torch.zeros_like(weight) for weight in weights] for _ in range(2)]
    steps = [torch.zeros(()) for _ in weights]
    group = {**SETTINGS, **FLAGS, "decoupled_weight_decay": decoupled}
    for step in range(count):
        lists = [weights, *moments, rounded, tensors(F32, 3 + step), steps]
        adam_(lists, [], factor(grad_scale), group, cautious=cautious)
    return [*weights, *rounded, *moments[0], *moments[1], *steps]


def exact_adam(grad_scale, decoupled, count, cautious):
    """Return the weights and moments by torch's own Adam in float64, and a loop's weight decay."""
    wide = [weight.double() for weight in tensors(F32, 1)]
    moments = [[torch.zeros_like(weight) for weight in wide] for _ in range(2)]
    steps = [torch.zeros(()) for _ in wide]
    beta1, beta2 = SETTINGS["betas"]
    settings = {k: v for k, v in SETTINGS.items() if k != "betas"} | FLAGS
    settings |= {"beta1": beta1, "beta2": beta2, "decoupled_weight_decay": decoupled}
    for step in range(count):
        grads = [grad.double() * grad_scale for grad in tensors(F32, 3 + step)]
        before = [weight.clone() for weight in wide]
        own = settings | {"weight_decay": 0.0} if cautious else settings
        adam(wide, grads, *moments, [], steps, foreach=False, **own)
        if cautious:
            for weight, old, mean in zip(wide, before, moments[0], strict=True):
                weight -= SETTINGS["lr"] * SETTINGS["weight_decay"] * old * (mean * old >= 0)
    return [*wide, *moments[0], *moments[1], *steps]


@pytest.mark.parametrize(("decoupled", "cautious"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("grad_scale", [1.0, 0.3])
def test_adam_is_as_exact_as_torch_s(grad_scale, decoupled, cautious):
    expected = exact_adam(grad_scale, decoupled, 4, cautious)
    for found in by_both(stepped, grad_scale, None, decoupled, 4, cautious):
        for value, exact in zip(found, expected, strict=True):
            # float32 rounds each of 4 steps some times, to 6e-8 of weights of up to 4
            torch.testing.assert_close(value.double(), exact.double(), rtol=1e-6, atol=5e-7)


def test_adam_rounds_weights_into_copies():
    for found in by_both(stepped, 0.3, BF16, True, 2):
        weights, copies = found[: len(SIZES)], found[len(SIZES) : 2 * len(SIZES)]
        assert all(map(torch.equal, [weight.bfloat16() for weight in weights], copies))


def test_adam_rests_where_the_coefficient_is_nan():
    for found in by_both(stepped, math.nan, BF16, True, 2):
        assert all(map(torch.equal, found, stepped(None, BF16, True, 0)))


def test_each_list_of_adam_has_a_dtype_of_its_own():
    # weights, both moments, copies, gradients
    dtypes = (F16, BF16, F32, BF16, BF16)
    group = {**SETTINGS, **FLAGS, "decoupled_weight_decay": True}
    found, exact = (
        [
            [t.to(kind) for t in tensors(own, seed)]
            for seed, own, kind in zip(range(5), dtypes, its, strict=True)
        ]
        for its in (dtypes, [F32] * 5)
    )
    for lists in (found, exact):
        for second in lists[2]:
            second.square_()
        with interpreted_kernels():
            adam_([*lists, [torch.zeros(()) for _ in SIZES]], [], None, group)
    exact[3] = [weight.to(F16) for weight in exact[0]]
    for some, wide, dtype in zip(found, exact, dtypes, strict=True):
        assert all(map(torch.equal, some, [value.to(dtype) for value in wide]))
