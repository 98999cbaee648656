"""Weights, gradients and state may each have any strides: the update is that of contiguous ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Shard

from megatron_eopt.fsdp2 import build_optimizer
from tests.harness import run_ranks
from tests.unit.fsdp2.models import config, eager, far, gradient, whole

SHAPES = {"matrix": (6, 8), "stack": (3, 4, 6), "image": (2, 3, 4, 5), "vector": (7,)}
OPTIMIZERS = {
    "adam": config("adam"),
    "adam, L2": config("adam", decoupled_weight_decay=False),
    "sgd": config("sgd", sgd_momentum=0.9),
    "lion": config("lion"),
    "muon": config(),
    "muon, L2": config(decoupled_weight_decay=False),
    "muon in 8 bits": config(muon_momentum_dtype="int8"),
    "adamuon": config("adaptive_muon", adaptive_muon_moment2_method="adamuon"),
    "namo": config("adaptive_muon", adaptive_muon_moment2_method="namo"),
    "soap": config("soap"),
}
REST = 17.0


def contiguous(value):
    return value.clone(memory_format=torch.contiguous_format)


def reversed_dimensions(value):
    last_first = [*reversed(range(value.dim()))]
    return value.permute(last_first).contiguous().permute(last_first)


def spread(value):
    """Return a view of every other element of a buffer."""
    buffer = torch.full((*value.shape, 2), REST, dtype=value.dtype)
    buffer[..., 0] = value
    return buffer[..., 0]


def inner(value):
    """Return a view of the inside of a larger buffer."""
    buffer = torch.full([size + 3 for size in value.shape], REST, dtype=value.dtype)
    view = buffer[tuple(slice(1, size + 1) for size in value.shape)]
    return view.copy_(value)


PLACES = {f.__name__: f for f in (contiguous, reversed_dimensions, spread, inner)}


def surroundings(view):
    """Return the elements of a view's memory that are not its own."""
    memory = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())
    own = torch.zeros(len(memory), dtype=torch.bool)
    own.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    return memory[~own]


class Model(nn.Module):
    def __init__(self, places):
        super().__init__()
        self.experts = nn.ParameterDict()
        for name, place in zip(SHAPES, places, strict=True):
            self.experts[name] = nn.Parameter(PLACES[place](gradient(name, SHAPES[name], -1)))


@eager
def trained(optimizer, weights, grads, states):
    """Return the model after three steps; state moves to other places before each."""
    model = Model(weights)
    built = build_optimizer(model, OPTIMIZERS[optimizer])
    for step in range(3):
        for (name, param), place, kept in zip(model.experts.items(), grads, states, strict=True):
            param.grad = PLACES[place](gradient(name, param.shape, step))
            state = built.state[param]
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.dim():
                    state[key] = PLACES[kept](value)
        built.step()
    return model, built


places = st.lists(st.sampled_from(sorted(PLACES)), min_size=len(SHAPES), max_size=len(SHAPES))


@settings(max_examples=12, deadline=None)
@given(places, places, places)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_strides_give_the_update_of_contiguous_tensors(optimizer, weights, grads, states):
    every = ["contiguous"] * len(SHAPES)
    expected = trained(optimizer, every, every, every)[0]
    model, built = trained(optimizer, weights, grads, states)
    for name, param in model.experts.items():
        torch.testing.assert_close(param, expected.experts[name], rtol=1e-5, atol=1e-6)
        kept = [value for value in built.state[param].values() if isinstance(value, torch.Tensor)]
        for tensor in (param.detach(), param.grad, *kept):
            assert (surroundings(tensor) == REST).all()


def cut_by_columns(optimizer, is_cut):
    """Return the weights after three steps."""
    torch.manual_seed(0)
    # a matrix with an odd number of columns, and the same for the scalar optimizer
    model = nn.ModuleDict({"matrix": nn.Linear(7, 5, bias=False), "table": nn.Embedding(5, 7)})
    if is_cut:
        mesh = init_device_mesh("cpu", (2,))
        for module in model.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                cut = nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(1)]))
                module.register_parameter(name, cut)
    built = build_optimizer(model, OPTIMIZERS[optimizer])
    for step in range(3):
        for name, param in model.named_parameters():
            grad = gradient(name, param.shape, step)
            if is_cut:
                # the local part is a view of all columns
                mine = grad.chunk(2, dim=1)[mesh.get_rank()]
                layout = {"shape": grad.shape, "stride": grad.stride(), "run_check": False}
                grad = DTensor.from_local(mine, mesh, [Shard(1)], **layout)
            param.grad = grad
        built.step()
    return {name: whole(param) for name, param in model.named_parameters()}


@pytest.mark.parametrize("optimizer", ["adam", "muon", "lion"])
def test_uneven_shards_of_columns_get_the_update_of_whole_matrices(optimizer):
    expected = run_ranks(1, cut_by_columns, optimizer, False)[0]
    for found in run_ranks(2, cut_by_columns, optimizer, True):
        assert far(found, expected)[0] < 1e-5
