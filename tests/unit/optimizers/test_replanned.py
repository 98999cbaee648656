"""Groups, settings and state that others change: the next step plans anew."""

import copy
import pickle

import pytest
import torch
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon as StockMuon

from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.muon import TensorParallelMuon
from tests.unit.optimizers.parameters import parameter

EXACT = {"fp32_matmul_prec": "highest"}
SHAPES = ((8, 6), (6, 8), (6, 8))  # two that could be taken for one another
KINDS = [
    (TensorParallelMuon, {}),
    (TensorParallelMuon, {"momentum_dtype": "int8"}),
    (TensorParallelAdaptiveMuon, {"moment2_method": "normuon"}),
]


def params_of(seed=0):
    return [parameter(*shape, seed=seed + n) for n, shape in enumerate(SHAPES)]


def made(kind, options, params):
    groups = [{"params": params[:1], "lr": 0.1}, {"params": params[1:], "lr": 0.2}]
    return kind(groups, **EXACT, **options)


def train(optimizer, params, steps=range(2)):
    for step in steps:
        for param, like in zip(params, params_of(10 * (step + 1)), strict=True):
            param.grad = like.grad
        optimizer.step()
    return [param.detach().clone() for param in params]


def test_main_copies_take_the_place_of_16_bit_weights():
    params = params_of()
    want = train(made(TensorParallelMuon, {}, params), params)
    halves = [torch.nn.Parameter(param.detach().bfloat16()) for param in params_of()]
    optimizer = made(TensorParallelMuon, {}, halves)
    mains = params_of()
    optimizer.param_groups[0]["params"][0] = mains[0]
    optimizer.param_groups[1]["params"][:] = mains[1:]
    assert all(map(torch.equal, train(optimizer, mains), want))


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_parameters_may_come_later(kind, options):
    late, alone = parameter(5, 7, seed=8), parameter(5, 7, seed=8)
    optimizer = made(kind, options, params_of())
    optimizer.step()
    optimizer.add_param_group({"params": [late], "lr": 0.1})
    optimizer.step()
    kind([alone], lr=0.1, **EXACT, **options).step()
    assert torch.equal(late, alone)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_state_that_was_thrown_away_starts_anew(kind, options):
    params = params_of()
    optimizer = made(kind, options, params)
    train(optimizer, params)
    anew = [torch.nn.Parameter(param.detach().clone()) for param in params]
    want = train(made(kind, options, anew), anew)
    optimizer.state.clear()
    assert all(map(torch.equal, train(optimizer, params), want))


def test_state_of_a_parameter_that_stock_never_stepped_starts_anew():
    params, theirs = params_of(), params_of()
    stock = StockMuon(theirs, lr=0.1, fp32_matmul_prec="highest", pg_collection=None)
    theirs[1].grad = None
    stock.step()
    optimizer = TensorParallelMuon(params, 0.1, **EXACT)
    optimizer.load_state_dict(stock.state_dict())
    assert [bool(optimizer.state[param]) for param in params] == [True, False, True]
    optimizer.step()
    assert all(optimizer.state[param]["momentum_buffer"].any() for param in params)


def pickled(pair):
    return pickle.loads(pickle.dumps(pair))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_copies_go_on_as_the_original(copied, kind, options):
    params = params_of()
    optimizer = made(kind, options, params)
    train(optimizer, params, range(1))
    other, theirs = copied((optimizer, params))
    want, got = train(optimizer, params, range(1, 3)), train(other, theirs, range(1, 3))
    assert all(map(torch.equal, got, want))


def test_rules_stay_where_parameters_only_move_or_leave():
    """New ones would be an agreement of all ranks, also if only one of them removes something."""
    params = params_of()
    optimizer = made(TensorParallelMuon, {}, params)
    train(optimizer, params, range(1))
    rules = optimizer._rules()
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
    optimizer.param_groups[1]["params"].pop(0)
    before = [param.detach().clone() for param in params]
    train(optimizer, params, range(1, 2))
    assert optimizer._rules() is rules
    moved = [not torch.equal(param, old) for param, old in zip(params, before, strict=True)]
    assert moved == [True, False, True]


def test_names_that_were_made_up_are_nobody_elses():
    weights = params_of()
    groups = [{"params": [("w 2", weights[0]), ("w", weights[1])]}, {"params": [("w", weights[2])]}]
    optimizer = TensorParallelMuon(groups, 0.1, **EXACT)
    before = [param.detach().clone() for param in weights]
    train(optimizer, weights, range(1))
    assert not any(map(torch.equal, weights, before))
