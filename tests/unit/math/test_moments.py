"""The second-moment rules against numpy, whole and in slabs."""

import numpy as np
import pytest
import torch

from megatron_eopt.math.moments import adamuon_, namo_, normuon_, statistic_shape
from tests.unit.math.ranks import Ranks

BETA2, EPS = 0.9, 1e-8


def test_adamuon_divides_entries_by_their_running_root_mean_square():
    torch.manual_seed(0)
    updates = [torch.randn(3, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64)]
    moments = [torch.rand_like(update) for update in updates]
    expected = [
        (u / ((BETA2 * m + (1 - BETA2) * u**2) / d).sqrt().add(EPS), BETA2 * m + (1 - BETA2) * u**2)
        for u, m, d in zip(updates, moments, [0.5, 0.25], strict=True)
    ]
    adamuon_(updates, moments, BETA2, EPS, [0.5, 0.25])
    for update, moment, (want_update, want_moment) in zip(updates, moments, expected, strict=True):
        torch.testing.assert_close(update, want_update)
        torch.testing.assert_close(moment, want_moment)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (4, 4), (1, 1), (1, 6)])
def test_normuon_normalizes_slices_and_keeps_the_norm(shape):
    rng = np.random.default_rng(1)
    update = rng.normal(size=(2, *shape))
    axis = 2 if shape[0] >= shape[1] else 1
    moment = rng.random((2, *statistic_shape("normuon", *shape)))
    mean = (update**2).mean(axis=axis, keepdims=True)
    want_moment = BETA2 * moment + (1 - BETA2) * mean
    want = update / np.sqrt(want_moment / 0.5)
    norm = np.linalg.norm(update, axis=(1, 2), keepdims=True)
    want *= norm / np.linalg.norm(want, axis=(1, 2), keepdims=True)
    got, got_moment = torch.tensor(update), torch.tensor(moment)
    normuon_(got, got_moment, BETA2, EPS, 0.5, shape=shape)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-12)
    np.testing.assert_allclose(got_moment.numpy(), want_moment, rtol=1e-12)


@pytest.mark.parametrize("shape", [(8, 4), (4, 8), (4, 4)])
def test_normuon_in_slabs_equals_the_whole(shape):
    torch.manual_seed(2)
    whole = torch.randn(2, *shape, dtype=torch.float64)
    moment = torch.rand(2, *statistic_shape("normuon", *shape), dtype=torch.float64)
    dim = 1 if shape[0] > shape[1] else 2
    slabs = [slab.clone() for slab in whole.chunk(2, dim)]
    cut = moment.size(dim) > 1
    moments = [m.clone() for m in moment.chunk(2, dim)] if cut else [moment.clone() for _ in "ab"]
    ranks = Ranks(2)

    def run(rank):
        reduce = ranks.sum(rank)
        normuon_(slabs[rank], moments[rank], BETA2, EPS, 1.0, shape=shape, reduce=reduce)

    ranks.run(run)
    normuon_(whole, moment, BETA2, EPS, 1.0, shape=shape)
    torch.testing.assert_close(torch.cat(slabs, dim), whole)
    torch.testing.assert_close(torch.cat(moments, dim) if cut else moments[0], moment)


def test_namo_divides_the_directions_norm_by_the_running_gradient_norm():
    moment = torch.tensor([4.0, 0.0], dtype=torch.float64)
    grad = torch.tensor([9.0, 16.0], dtype=torch.float64)
    factor = namo_(moment, grad, torch.tensor([25.0, 4.0], dtype=torch.float64), BETA2, EPS, 0.1)
    torch.testing.assert_close(moment, torch.tensor([4.5, 1.6], dtype=torch.float64))
    want = torch.tensor([5 / 45**0.5, 2 / 4.0], dtype=torch.float64)
    torch.testing.assert_close(factor, want, rtol=1e-7, atol=0)
