"""Groups that others change in place, and state that is loaded or lost."""

import copy
import pickle
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon as StockMuon

from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.muon import TensorParallelMuon
from tests.harness import run_ranks
from tests.unit.optimizers.parameters import parameter

EXACT = {"fp32_matmul_prec": "highest"}
SHAPES = ((8, 6), (6, 8), (6, 8))  # two that could be taken for one another
KINDS = [
    (TensorParallelMuon, {}),
    (TensorParallelMuon, {"momentum_dtype": "bf16"}),
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
@pytest.mark.parametrize("order", list(permutations(range(3)))[1:], ids=str)
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
    # noise of bfloat16 comes from names, which places have
    exact = options.get("momentum_dtype") != "bf16"
    want, got = train(optimizer, params, range(1, 3)), train(resumed, others, range(1, 3))
    for this, that in zip(got, want, strict=True):
        torch.testing.assert_close(this, that, rtol=0, atol=0 if exact else 1e-2)


@pytest.mark.parametrize("momentum_dtype", ["bf16", "fp8", "int8"])
def test_momentum_of_fp16_parameters_is_loaded_as_it_was_saved(momentum_dtype):
    """It is smaller than what fp16 can hold."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.ones(8, 6, dtype=torch.float16)) for _ in range(2)]
    one, other = (
        TensorParallelMuon([("weight", param)], momentum_dtype=momentum_dtype) for param in params
    )
    params[0].grad = (torch.randn(8, 6, generator=generator) * 1e-7).half()
    one.step()
    saved = one.state_dict()
    other.load_state_dict(saved)
    before, after = (its.state_dict()["state"][0]["momentum_buffer"] for its in (one, other))
    assert before.dtype == torch.float32
    assert before.count_nonzero() > 24
    assert torch.equal(after, before)


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


@pytest.mark.parametrize("shape", [(8, 6), (3, 3)])
def test_a_parameter_without_a_plan_is_refused(shape):
    params = params_of()
    optimizer = made(TensorParallelMuon, {}, params)
    optimizer.param_groups[0]["params"].append(parameter(*shape))
    with pytest.raises(ConfigurationError, match=r"add_param_group"):
        optimizer.step()
    optimizer.param_groups[0]["params"] = [parameter(3, 3)]
    with pytest.raises(ConfigurationError, match=r"shape \(3, 3\)"):
        optimizer.step()


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
    momenta = [optimizer.state[param]["momentum_buffer"] for param in params]
    assert [bool(momentum.any()) for momentum in momenta] == [True, False, True]
    optimizer.step()


def without(kind):
    return lambda state: state["state"][0].pop(kind)


def of_shape(kind, *shape):
    return lambda state: state["state"][0].update({kind: torch.ones(shape)})


def in_group(**values):
    return lambda state: state["param_groups"][0].update(values)


@pytest.mark.parametrize(
    ("kind", "options", "spoil", "said"),
    [
        (TensorParallelMuon, {}, of_shape("momentum_buffer", 6, 8), r"0.*\(6, 8\).*\(8, 6\)"),
        (TensorParallelMuon, {}, of_shape("momentum_buffer", 48), r"\(48,\)"),
        (TensorParallelMuon, {}, of_shape("momentum_buffer"), r"\(\)"),
        (*KINDS[2], of_shape("momentum_buffer", 6, 8), r"\(6, 8\)"),
        (*KINDS[2], without("momentum_buffer"), "lacks 'momentum_buffer'"),
        (*KINDS[3], without("moment2_buffer"), "lacks 'moment2_buffer'"),
        (*KINDS[3], of_shape("moment2_buffer", 8, 6), r"\(8, 6\).*\(8, 1\)"),
        (*KINDS[3], lambda state: state["param_groups"][0].pop("beta2"), "lacks beta2"),
        (TensorParallelMuon, {}, in_group(lr=[0.1]), r"lr=\[0.1\]"),
        (TensorParallelMuon, {}, in_group(momentum=2.0), "momentum=2.0"),
    ],
)
def test_state_that_no_step_could_use_is_refused(kind, options, spoil, said):
    params = params_of()
    optimizer = made(kind, options, params)
    train(optimizer, params, range(1))
    spoilt = copy.deepcopy(optimizer.state_dict())
    spoil(spoilt)
    want = copy.deepcopy(optimizer.state_dict())
    with pytest.raises((ConfigurationError, ConfigurationTypeError), match=said):
        optimizer.load_state_dict(spoilt)
    torch.testing.assert_close(optimizer.state_dict(), want, rtol=0, atol=0)


def spoilt_on_one_rank():
    param = parameter(4, 6)
    param.partition_dim = 0
    groups = SimpleNamespace(tp=dist.group.WORLD)
    optimizer = TensorParallelMuon([param], pg_collection=groups, momentum_dtype="int8")
    state = copy.deepcopy(optimizer.state_dict())
    if dist.get_rank() == 1:
        state["state"][0]["momentum_buffer"] = torch.zeros(6, 4)
    try:
        optimizer.load_state_dict(state)
    except ConfigurationError as error:
        return str(error)
    return None


def test_what_one_rank_cannot_load_no_rank_loads():
    first, second = run_ranks(2, spoilt_on_one_rank)
    assert first == second
    assert "(6, 4)" in first


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize(("kind", "options"), KINDS[::3])
def test_copies_are_refused(copied, kind, options):
    with pytest.raises(ConfigurationTypeError, match=r"load a deep copy of state_dict\(\)"):
        copied(made(kind, options, params_of()))
