"""Convolutions, and weights that are stored transposed, are updated as the matrices that they are.

The oracle is a linear layer whose weight is that matrix, with the same gradient.
"""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.matrices import gated, qkv, transposed, whole
from megatron_eopt.megatron_fsdp import build_optimizer
from tests.harness.each_rank import on_ranks
from tests.unit.fsdp2.models import config, eager, far, shard, weights

KERNELS = {
    # layer, and its matrices: their shape as linear layers, and whether they are stored transposed
    "1-D": (lambda: nn.Conv1d(6, 8, 3), 1, False),
    "2-D": (lambda: nn.Conv2d(6, 8, (3, 2)), 1, False),
    "3-D": (lambda: nn.Conv3d(2, 4, 2), 1, False),
    "1 x 1": (lambda: nn.Conv2d(6, 8, 1), 1, False),
    "grouped": (lambda: nn.Conv2d(6, 8, 3, groups=2), 2, False),
    "transposed": (lambda: nn.ConvTranspose2d(6, 8, 3), 1, True),
    "transposed, 3-D": (lambda: nn.ConvTranspose3d(4, 6, 2), 1, True),
    "transposed and grouped": (lambda: nn.ConvTranspose1d(6, 8, 3, groups=2), 2, True),
}
FIELDS = {
    "muon": {"muon_scale_mode": "unit_rms_norm"},
    "normuon": {"muon_scale_mode": "shape_scaling"},
    "adamuon": {"muon_scale_mode": "unit_rms_norm"},
    "namo": {"muon_scale_mode": "unit_rms_norm"},
    "soap": {},
}


def settings(method, **fields):
    return config(method, **FIELDS[method], **fields)


def gradient(shape, step):
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


def as_linear(weight, groups, is_transposed):
    """Return a weight's matrices as a linear layer stores them."""
    parts = [part.flatten(1) for part in weight.detach().chunk(groups)]
    return [part.T.contiguous() if is_transposed else part.clone() for part in parts]


@eager
def linear_steps(parts, grads, method):
    model = nn.ModuleList(nn.Linear(*reversed(part.shape), bias=False) for part in parts)
    for layer, part in zip(model, parts, strict=True):
        layer.weight.data.copy_(part)
    optimizer = build_optimizer(model, settings(method), output_layers=())
    for step in grads:
        for layer, grad in zip(model, step, strict=True):
            layer.weight.grad = grad
        optimizer.step()
    return [layer.weight.detach() for layer in model]


@eager
def conv_steps(model, method, **fields):
    optimizer = build_optimizer(model, settings(method, **fields), output_layers=())
    for step in range(3):
        for param in model.parameters():
            param.grad = shard(gradient(param.shape, step), param)
        optimizer.step()
    return weights(model)["weight"], optimizer


@pytest.mark.parametrize("method", FIELDS)
@pytest.mark.parametrize("kind", KERNELS)
def test_a_convolution_is_updated_as_its_matrix(kind, method):
    make, groups, is_transposed = KERNELS[kind]
    if method == "soap" and is_transposed:
        pytest.skip("SOAP's eigenvectors of two sides are not exact mirror images")
    model = make()
    start = model.weight.detach().clone()
    if method == "soap":
        model.weight.eopt_split = "whole"
    fields = {} if method == "soap" else {"muon_convolutions": True}
    found, _ = conv_steps(model, method, **fields)
    grads = [as_linear(gradient(start.shape, step), groups, is_transposed) for step in range(3)]
    expected = linear_steps(as_linear(start, groups, is_transposed), grads, method)
    pairs = zip(as_linear(found, groups, is_transposed), expected, strict=True)
    for number, (ours, theirs) in enumerate(pairs):
        assert far({number: ours}, {number: theirs})[0] < 1e-5
    assert far({0: found}, {0: start})[0] > 1e-3


def test_a_declared_convolution_needs_no_setting_and_depthwise_ones_stay_whole_vectors():
    model = nn.Conv2d(6, 8, 3)
    expected, _ = conv_steps(copy.deepcopy(model), "muon", muon_convolutions=True)
    for declared in ("whole", whole(model.weight.shape), whole((8, 54))):
        other = copy.deepcopy(model)
        other.weight.eopt_split = declared
        assert torch.equal(conv_steps(other, "muon")[0], expected)
    halves = copy.deepcopy(model)
    halves.weight.eopt_split = gated(model.weight.shape)
    found, _ = conv_steps(halves, "muon")
    assert far({0: found}, {0: expected})[0] > 1e-3
    depthwise = nn.Conv2d(4, 4, 3, groups=4)
    _, optimizer = conv_steps(depthwise, "muon", muon_convolutions=True)
    assert {group["optimizer"] for group in optimizer.param_groups} == {"adam"}
    halves.weight.eopt_split = gated((8, 50))
    with pytest.raises(ConfigurationError, match=r"weight=\(8, 54\).*gated split"):
        conv_steps(halves, "muon")


def test_memory_formats_do_not_change_the_update():
    model = nn.Conv2d(6, 8, 3)
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    assert not other.weight.is_contiguous()
    for method in ("muon", "normuon"):
        ours, theirs = (
            conv_steps(copy.deepcopy(m), method, muon_convolutions=True)[0] for m in (model, other)
        )
        assert far({0: ours}, {0: theirs})[0] < 1e-6


def after_steps(kind, dim=None):
    """Return the weight after three steps, cut over all ranks if along a dimension."""
    torch.manual_seed(3)
    model = KERNELS[kind][0]()
    if dim is not None:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(dim if p.dim() > 1 else 0))
        assert isinstance(model.weight, DTensor)
    return conv_steps(model, "muon", muon_convolutions=True)[0]


@on_ranks(2, cpu=False)
def test_sharded_convolutions_are_those_of_one_process():
    for cut in itertools.product(KERNELS, (0, 1)):
        if cut != ("grouped", 1):
            assert far({cut: after_steps(*cut)}, {cut: after_steps(cut[0])})[0] < 2e-6


class InputsFirst(nn.Module):
    """A layer whose weight is ``(in, out)``, and a square one."""

    def __init__(self, rows, cols):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, cols))


TURNED = {
    # the shape of the linear weight, its split, and what is declared on the transposed one
    "tall": ((9, 4), None, "transposed"),
    "wide": ((4, 10), None, transposed(whole((4, 10)))),
    "square": ((6, 6), None, "transposed"),
    "columns": ((8, 6), qkv((8, 6), [4, 2, 2]), transposed(qkv((8, 6), [4, 2, 2]))),
    "blocks": ((8, 6), qkv((8, 6), [2, 1, 1]), transposed(qkv((8, 6), [2, 1, 1]))),
    "heads": (
        (8, 6),
        qkv((8, 6), [4, 2, 2], head_dim=2),
        transposed(qkv((8, 6), [4, 2, 2], head_dim=2)),
    ),
}


def turned(case, method, *, is_cut=False):
    """Return the weights of a linear layer and of its transpose, both ``(out, in)``."""
    shape, split, declared = TURNED[case]
    torch.manual_seed(5)
    models = nn.Linear(*reversed(shape), bias=False), InputsFirst(*reversed(shape))
    models[1].weight.data.copy_(models[0].weight.data.T)
    found = []
    for model, what in zip(models, (split, declared), strict=True):
        if what is not None:
            model.weight.eopt_split = what
        if is_cut:
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = build_optimizer(model, settings(method), output_layers=())
        for step in range(3):
            grad = gradient(shape, step)
            grad = grad if model is models[0] else grad.T.contiguous()
            model.weight.grad = shard(grad, model.weight)
            optimizer.step()
        found.append(weights(model)["weight"])
    return found[0], found[1].T


@pytest.mark.parametrize("method", [method for method in FIELDS if method != "soap"])
@pytest.mark.parametrize("case", TURNED)
def test_a_transposed_weight_is_updated_as_its_linear_twin(case, method):
    ours, theirs = eager(turned)(case, method)
    assert far({case: ours}, {case: theirs})[0] < 2e-5


@on_ranks(2, cpu=False)
@eager
def test_sharded_transposed_weights_are_those_of_one_process():
    for case, method in itertools.product(TURNED, ("muon", "normuon")):
        ours, theirs = turned(case, method, is_cut=True)
        assert far({0: ours}, {0: theirs})[0] < 2e-5, (case, method)
