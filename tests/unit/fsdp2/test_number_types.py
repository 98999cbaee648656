"""Complex and float64 weights are stepped as torch steps them, or refused by name."""

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.fsdp2 import ParamKey, build_optimizer
from tests.harness import run_ranks
from tests.unit.fsdp2.models import config, eager, far, stepped

KINDS = (torch.float32, torch.float64, torch.complex64, torch.complex128)
TOLERANCES = {torch.float32: 2e-6, torch.complex64: 2e-6}
"""Largest relative distance after a few steps; some roundings of each dtype."""
SHAPES = ((), (5,), (3, 4), (2, 3, 2))
STEPS = 4
LR, DECAY = 0.02, 0.1
DECAYED = {ParamKey(name="*"): {"wd_mult": 1.0}}
"""Vectors decay, too, as in torch."""
BETAS = {"betas": (0.9, 0.95), "eps": 1e-8}


def adamw(params):
    return torch.optim.AdamW(params, LR, weight_decay=DECAY, **BETAS)


THEIRS = {
    # fields of the configuration, and torch's optimizer
    "AdamW": ({"optimizer": "adam"}, adamw),
    "Adam": (
        {"optimizer": "adam", "decoupled_weight_decay": False},
        lambda p: torch.optim.Adam(p, LR, weight_decay=DECAY, **BETAS),
    ),
    "SGD": (
        {"optimizer": "sgd", "sgd_momentum": 0.9},
        lambda p: torch.optim.SGD(p, LR, momentum=0.9, weight_decay=DECAY),
    ),
    # the scalar optimizer of another one
    "Muon": ({"optimizer": "muon"}, adamw),
}


class Parameters(nn.Module):
    """One parameter in a module of its own for each shape and dtype."""

    def __init__(self, kinds):
        super().__init__()
        torch.manual_seed(0)
        for number, (shape, dtype) in enumerate(kinds):
            home = nn.Module()
            home.value = nn.Parameter(torch.randn(shape, dtype=dtype))
            self.add_module(f"p{number}", home)


def fields_of(kind):
    fields = {"adam_beta2": 0.95, "adam_eps": 1e-8, "lr": LR, "weight_decay": DECAY}
    return config(**fields, **THEIRS[kind][0])


def reloaded(optimizer, model, kind):
    """Return a new optimizer with the state of a saved one."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = build_optimizer(model, fields_of(kind), DECAYED)
    other.load_state_dict(torch.load(file, weights_only=False))
    return other


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(KINDS)), min_size=1, max_size=5),
    st.sampled_from(sorted(THEIRS)),
    st.integers(0, STEPS),
)
@eager
def test_mixed_models_are_stepped_as_by_torch(kinds, kind, saved_at):
    model = Parameters(kinds)
    theirs = copy.deepcopy(model)
    # a weight may pass through zero, where rounding is that of the values that it came from
    sizes = [param.detach().norm() for param in model.parameters()]
    optimizer = build_optimizer(model, fields_of(kind), DECAYED)
    expected = THEIRS[kind][1](theirs.parameters())
    for step in range(STEPS):
        if step == saved_at:
            optimizer = reloaded(optimizer, model, kind)
        stepped(model, optimizer, step)
        stepped(theirs, expected, step)
    for param, other, size in zip(model.parameters(), theirs.parameters(), sizes, strict=True):
        distance = (param - other).norm() / max(other.norm(), size)
        assert distance <= TOLERANCES.get(param.dtype, 1e-13)


@eager
def test_a_gradient_may_be_a_lazy_conjugate():
    """As torch's autograd returns some, and copies none."""
    found = []
    for lazy in (True, False):
        model = Parameters([((3, 4), torch.complex64)])
        grad = torch.randn(3, 4, dtype=torch.complex64, generator=torch.manual_seed(1)).conj()
        (param,) = model.parameters()
        param.grad = grad if lazy else grad.resolve_conj()
        build_optimizer(model, fields_of("AdamW"), DECAYED).step()
        found.append(param.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon", "adaptive_muon", "lion", "laprop"])
@eager
def test_float64_weights_keep_their_digits(optimizer):
    model = nn.Linear(6, 4).double()
    before = copy.deepcopy(dict(model.named_parameters()))
    built = build_optimizer(model, config(optimizer=optimizer, lr=1e-30), output_layers=())
    stepped(model, built, 0, 1)
    assert all(torch.equal(before[name], param) for name, param in model.named_parameters())


@pytest.mark.parametrize("optimizer", ["muon", "adaptive_muon", "lion", "laprop"])
@eager
def test_float64_matrices_get_the_update_of_float32_ones(optimizer):
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = nn.Linear(24, 16, bias=False).to(dtype)
        built = build_optimizer(model, config(optimizer=optimizer), output_layers=())
        found.append(stepped(model, built, *range(STEPS)))
    assert far(*found)[0] < 1e-6


@eager
def sharded():
    model = Parameters([((6, 4), dtype) for dtype in KINDS])
    if torch.distributed.get_world_size() > 1:
        for part in model.children():  # torch shards parameters of one dtype together
            fully_shard(part)
    optimizer = build_optimizer(model, fields_of("Muon"))
    return stepped(model, optimizer, *range(STEPS))


def test_shards_are_stepped_as_in_one_process():
    (one,) = run_ranks(1, sharded)
    for found in run_ranks(2, sharded):
        for name, tensor in found.items():
            assert tensor.dtype == one[name].dtype
            assert (tensor - one[name]).norm() <= 1e-6 * one[name].norm()


@pytest.mark.parametrize("optimizer", ["soap", "psgd_pro", "scion"])
def test_optimizers_that_compute_in_float32_refuse_float64(optimizer):
    model = nn.Linear(6, 4).double()
    text = rf"weight=torch.float64: {optimizer} computes in float32.*Convert it to float32"
    with pytest.raises(ConfigurationError, match=text):
        build_optimizer(model, config(optimizer=optimizer), output_layers=())
