"""Momentum in few bits: the same however it is cut, small between steps, and carried over."""

import copy
from collections import defaultdict
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.math.low_precision import FORMATS
from megatron_eopt.matrices import qkv, whole
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.exchange import ExchangeConfig
from megatron_eopt.optimizers.momentum import RoundedMomentum
from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.storage.shard import Fragment
from tests.harness import run_ranks
from tests.harness.shards import StoredParameter
from tests.unit.optimizers.parameters import parameter

FUSED = qkv((32, 40), (8, 4, 4))
WIDE = qkv((32, 72), (8, 4, 4))  # a row has two blocks and the beginning of a third


def step_in_waves(dtype, cuts):
    """Step a fused parameter, a wave for each matrix; return this rank's part and its momentum."""
    group, rank = (dist.group.WORLD, dist.get_rank()) if cuts else (None, 0)
    places = tuple(Fragment(0, *ends) for ends in pairwise((0, *cuts, 32 * 72)))
    shard = StoredParameter("w", WIDE, -1, 1, places).shard(group)
    mine = slice(places[rank].start, places[rank].stop)
    param = torch.nn.Parameter(parameter(*WIDE.shape).detach().view(1, -1)[:, mine])
    settings = {"fp32_matmul_prec": "highest", "momentum_dtype": dtype, "matrix_buffer_mb": 1e-3}
    optimizer = TensorParallelMuon([param], 0.02, **settings)
    update_rule = optimizer.update_rule_over([shard], ExchangeConfig("duplicated"))
    assert len(update_rule.exchange.waves) == 3
    groups, state = optimizer.param_groups, defaultdict(dict)
    shard.main = param
    update_rule.attach(groups)
    update_rule.init(groups, state)
    for step in range(3):
        param.grad = parameter(*WIDE.shape, seed=step).grad.view(1, -1)[:, mine].clone()
        update_rule.step(groups, state)
    return param.detach(), update_rule.rounding.read(0, state[param])


@pytest.mark.parametrize("dtype", FORMATS)
def test_ranks_that_need_a_parameter_in_other_waves_keep_it_alike(dtype):
    weight, momentum = step_in_waves(dtype, ())
    # the second rank stores none of Q, which comes first, and shares a block of V with the third;
    # the last one begins inside the second block of a row
    parts = run_ranks(4, step_in_waves, dtype, (8 * 72, 15 * 72 + 20, 22 * 72 + 36))
    assert torch.equal(torch.cat([kept for _, kept in parts], 1), momentum)
    torch.testing.assert_close(torch.cat([own for own, _ in parts], 1), weight)


def test_blocks_that_lie_whole_on_one_rank_are_not_spoken_about(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", None)
    place = tuple(Fragment(rank, 0, 64 * 6) for rank in range(2))
    shard = StoredParameter("w", whole((6, 128)), 1, 2, place).shard()
    momentum, state = RoundedMomentum("int8", [shard], "cpu"), {"step": torch.zeros(())}
    momentum.make(0, state, torch.randn(64 * 6))
    momentum.write([0], {0: (state, torch.randn(64 * 6))})


def rounded_up(fraction, steps):
    """Return which entries of equal gradients are rounded up in each step, ``(steps, 6, 640)``.

    Two parameters are one matrix each, one is fused of several, and one has two experts. Without
    momentum, the state is the rounded gradient.
    """
    shapes = {"a": (16, 40), "b": (16, 40), "fused": FUSED.shape, "experts": (2, 16, 40)}
    params = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    splits = {param: FUSED if name == "fused" else None for name, param in params.items()}
    how = {"momentum": 0.0, "momentum_dtype": "bf16", "splits": splits}
    optimizer = TensorParallelMuon(list(params.items()), **how)
    found = []
    for _ in range(steps):
        for param in params.values():
            # between two neighbours, whose distance is 2^-7
            param.grad = torch.full_like(param, 1 + fraction * 2.0**-7)
        optimizer.step()
        kept = [optimizer.state[param]["momentum_buffer"].float() for param in params.values()]
        assert all(set(momentum.unique().tolist()) == {1.0, 1 + 2.0**-7} for momentum in kept)
        found.append(torch.cat([momentum.reshape(-1, 640) for momentum in kept]) > 1)
    return torch.stack(found).double()


def test_noise_differs_between_steps_parameters_matrices_rows_and_columns():
    found = rounded_up(0.5, steps=8)
    for patterns in (
        found.reshape(-1, 640),  # each 16 rows of a parameter, in each step
        found.view(8 * 6, 16, 40).transpose(0, 1).reshape(16, -1),
        found.view(8 * 6 * 16, 40).T,
    ):
        noise = torch.corrcoef(patterns)[~torch.eye(len(patterns), dtype=torch.bool)]
        # a correlation of independent entries has this standard deviation
        assert noise.abs().max() < 6 / patterns.shape[1] ** 0.5


def test_what_is_lost_by_rounding_is_made_up_for_over_the_steps():
    steps, fraction = 64, 0.3
    found = rounded_up(fraction, steps)
    deviation = (fraction * (1 - fraction)) ** 0.5
    assert abs(found.mean() - fraction) < 6 * deviation / found.numel() ** 0.5
    assert (found.mean(0) - fraction).abs().max() < 6 * deviation / steps**0.5


def test_what_is_loaded_is_rounded_to_the_nearest():
    shard = StoredParameter("w", whole((8, 40)), -1, 1, (Fragment(0, 0, 320),)).shard()
    exact = parameter(8, 40).detach().view(1, -1)
    momentum, state = RoundedMomentum("bf16", [shard], "cpu"), {"step": torch.tensor(3.0)}
    momentum.make(0, state, exact)
    momentum.write([0], {0: (state, exact)}, nearest=True)
    assert torch.equal(state["momentum_buffer"], exact.bfloat16())


def trained(cls, dtype, steps, *, loaded=None):
    params = [parameter(12, 20), parameter(40, 70)]
    optimizer = cls(params, 0.02, fp32_matmul_prec="highest", momentum_dtype=dtype)
    if loaded is not None:
        weights, state = loaded
        for param, weight in zip(params, weights, strict=True):
            param.data.copy_(weight)
        optimizer.load_state_dict(state)
    for step in range(*steps):
        for param in params:
            param.grad = parameter(*param.shape, seed=step).grad
        optimizer.step()
    return [param.detach() for param in params], optimizer


def momenta(optimizer):
    states = optimizer.state_dict()["state"].values()
    return [values["momentum_buffer"] for values in states]


@pytest.mark.parametrize("cls", [TensorParallelMuon, TensorParallelAdaptiveMuon])
@pytest.mark.parametrize("dtype", FORMATS)
def test_state_is_small_and_goes_on_bit_equal(cls, dtype):
    weights, whole_run = trained(cls, dtype, (0, 4))
    half, optimizer = trained(cls, dtype, (0, 2))
    for param, values in optimizer.state.items():
        assert values["momentum_buffer"].dtype == FORMATS[dtype].dtype
        assert values["momentum_buffer"].shape == param.shape
        scales = values.get("momentum_scale", torch.empty(0))
        blocks = param.shape[0] * -(-param.shape[1] // 32)
        assert scales.nbytes == (0 if dtype == "bf16" else blocks)
    assert all(momentum.dtype == torch.float32 for momentum in momenta(optimizer))
    state = optimizer.state_dict()
    saved = copy.deepcopy(state)
    resumed, again = trained(cls, dtype, (2, 4), loaded=(half, state))
    assert all(map(torch.equal, resumed, weights))
    # neither whoever was saved nor whoever was loaded has changed it
    for param in optimizer.state:
        param.grad = torch.ones_like(param)
    optimizer.step()
    for key, values in saved["state"].items():
        assert torch.equal(state["state"][key]["momentum_buffer"], values["momentum_buffer"])
    assert all(map(torch.equal, momenta(again), momenta(whole_run)))
    kinds = {values["momentum_buffer"].dtype for values in again.state.values()}
    assert kinds == {FORMATS[dtype].dtype}


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_run_may_change_the_dtype_there_and_back(dtype):
    half, exact = trained(TensorParallelMuon, "fp32", (0, 2))
    assert "step" not in exact.state_dict()["state"][0]
    _, rounded = trained(TensorParallelMuon, dtype, (2, 2), loaded=(half, exact.state_dict()))
    for few, many in zip(momenta(rounded), momenta(exact), strict=True):
        # half of the spacing of float8, the widest of all, below the largest of a block
        assert (few - many).abs().max() <= many.abs().max() / 16
        assert not torch.equal(few, many)
    _, back = trained(TensorParallelMuon, "fp32", (2, 2), loaded=(half, rounded.state_dict()))
    assert all(map(torch.equal, momenta(back), momenta(rounded)))
    weights, _ = trained(TensorParallelMuon, dtype, (2, 4), loaded=(half, exact.state_dict()))
    assert all(weight.isfinite().all() for weight in weights)
