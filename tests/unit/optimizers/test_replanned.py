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


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1)], ids=str)
def test_parameters_may_change_places(kind, options, order):
    params = params_of()
    want = train(made(kind, options, params), params)
    params = params_of()
    optimizer = made(kind, options, params)
    train(optimizer, params, range(1))
    groups = optimizer.param_groups
    rates = {param: group["lr"] for group in groups for param in group["params"]}
    groups[:] = [{**groups[0], "params": [params[n]], "lr": rates[params[n]]} for n in order]
    got = train(optimizer, params, range(1, 2))
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_state_is_saved_for_the_places_where_parameters_are(kind, options):
    params = params_of()
    optimizer = made(kind, options, params)
    train(optimizer, params, range(1))
    optimizer.param_groups[1]["params"].reverse()
    saved = copy.deepcopy(optimizer.state_dict())
    others = [torch.nn.Parameter(param.detach().clone()) for param in params]
    resumed = made(kind, options, [others[0], others[2], others[1]])
    resumed.load_state_dict(saved)
    want = train(optimizer, params, range(1, 3))
    assert all(map(torch.equal, train(resumed, others, range(1, 3)), want))


def test_main_copies_take_the_place_of_16_bit_weights():
    params = params_of()
    want = train(made(TensorParallelMuon, {}, params), params)
    halves = [torch.nn.Parameter(param.detach().bfloat16()) for param in params_of()]
    optimizer = made(TensorParallelMuon, {}, halves)
    mains = params_of()
    optimizer.param_groups[0]["params"][0] = mains[0]
    optimizer.param_groups[1]["params"][:] = mains[1:]
    assert all(map(torch.equal, train(optimizer, mains), want))


def test_parameters_that_are_taken_out_rest_and_come_back():
    params = params_of()
    optimizer = made(TensorParallelMuon, {}, params)
    train(optimizer, params, range(1))
    before = params[1].detach().clone()
    optimizer.param_groups[1]["params"].remove(params[1])
    train(optimizer, params, range(1, 2))
    assert torch.equal(params[1], before)
    optimizer.param_groups[1]["params"].append(params[1])
    train(optimizer, params, range(2, 3))
    assert not torch.equal(params[1], before)


@pytest.mark.parametrize("by", ["add_param_group", "append"])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_parameters_may_come_later(kind, options, by):
    late, alone = parameter(5, 7, seed=8), parameter(5, 7, seed=8)
    optimizer = made(kind, options, params_of())
    optimizer.step()
    if by == "append":
        optimizer.param_groups[0]["params"].append(late)
    else:
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
