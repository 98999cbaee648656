"""A storage of plain tensors says which part of each parameter a rank has, and in which group."""

from contextlib import nullcontext

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import param_is_not_shared
from megatron.core.transformer import TransformerConfig
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig, get_megatron_optimizer
from megatron_eopt.contrib.declared_boxes import build_sharded
from megatron_eopt.extending import register_storage
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.matrices import gated, whole
from megatron_eopt.testing import conformance
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import wrap_ddp


@register_storage
def in_parts(context):
    """Build the optimizer of a model that is cut into parts."""
    if not hasattr(context.model_chunks[0], "is_in_parts"):
        return None
    return build_sharded(context, distributed.group.WORLD)


def cut(model, dim):
    """Let the second rank have about two thirds of each parameter."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    for param in model.parameters():
        at = min(dim, param.dim() - 1)
        whole, offset = tuple(param.shape), [0] * param.dim()
        ends = (0, whole[at]) if ranks == 1 else (0, whole[at] // 3, whole[at])
        offset[at], stop = ends[rank : rank + 2]
        param.eopt_place = (tuple(offset), whole)
        param.data = param.data.narrow(at, offset[at], stop - offset[at]).clone()
    model.is_in_parts = True
    return model


def in_rows(model):
    """Cut rows."""
    return cut(model, 0)


def in_columns(model):
    """Cut columns, and vectors."""
    return cut(model, 1)


@pytest.mark.parametrize(
    ("optimizer", "config", "storage"),
    [
        ("muon", {}, in_rows),
        ("muon", {}, in_columns),
        pytest.param("soap", {"clip_grad": 0.0}, in_rows, marks=pytest.mark.long),
        ("soap", {"clip_grad": 0.0}, in_columns),
        ("muon", {"bf16": True}, in_rows),
        ("adam", {}, in_rows),
    ],
)
def test_two_ranks_train_as_one_does(optimizer, config, storage):
    conformance.check(optimizer, config, storage=storage)


class Experts(nn.Module):
    """Weights of three experts, of which each rank has some rows of each, and a copied gain."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 8, 6, generator=generator))
        self.weight.eopt_split = "whole"
        self.gain = nn.Parameter(torch.ones(()))


def trained_experts():
    """Return this rank's part of the experts after a step, its whole gradient norm and zeros."""
    parallel_state.initialize_model_parallel()
    model, ranks = Experts(), distributed.get_world_size()
    rows = slice(0, 8) if ranks == 1 else (slice(0, 3), slice(3, 8))[distributed.get_rank()]
    model.weight.eopt_place = ((0, rows.start, 0), (3, 8, 6))
    model.gain.eopt_place = ((), ())
    model.weight.data = model.weight.data[:, rows].clone()
    model.is_in_parts = True
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.1, log_num_zeros_in_grad=True)
    optimizer = get_megatron_optimizer(config, [model])
    gradient = torch.arange(144.0).view(3, 8, 6)
    model.weight.grad, model.gain.grad = gradient[:, rows].clone(), torch.zeros(())
    _, norm, zeros = optimizer.step()
    counted = [param_is_not_shared(model.gain), param_is_not_shared(model.weight)]
    return model.weight.detach(), float(norm), zeros, counted


def test_rows_of_every_expert_are_parts_and_copies_count_once():
    (whole, norm, zeros, _), *_ = run_ranks(1, trained_experts)
    first, second = run_ranks(2, trained_experts)
    torch.testing.assert_close(torch.cat([first[0], second[0]], 1), whole, rtol=0, atol=1e-6)
    for found in (first, second):
        assert found[1:3] == (pytest.approx(norm), zeros)
    assert (first[3], second[3]) == ([True, True], [False, True])


PLACES = {
    "must be set on every parameter": lambda rank: None,
    "must be .offset, shape.": lambda rank: ((7, 0), (8, 6)),
    "does not store every element": lambda rank: ((2 * rank, 0), (8, 6)),
    "must be parts of the same parameters": lambda rank: ((0, 0), (4 + rank, 6)),
}


def refused(rank_of_place, build, words):
    """Build over a weight with a place, and check what is raised."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    model = nn.Linear(6, 4, bias=False)
    if (place := rank_of_place(distributed.get_rank())) is not None:
        model.weight.eopt_place = place
    model.is_in_parts = True
    with pytest.raises(ConfigurationError, match=words):
        build(EmergingOptimizerConfig(optimizer="muon", lr=0.1), model)


def by_factory(config, model):
    get_megatron_optimizer(config, [model])


@pytest.mark.parametrize("rule", PLACES)
@on_ranks(2)
def test_parts_that_do_not_add_up_raise_on_all_ranks(rule):
    refused(PLACES[rule], by_factory, rule)


@on_ranks(2)
def test_a_part_is_not_taken_for_a_whole_parameter():
    """By our own storages."""

    def build(config, model):
        del model.is_in_parts
        by_factory(config, model)

    for way in (build, lambda config, model: build_optimizer(model, config)):
        refused(lambda rank: ((4 * rank, 0), (8, 6)), way, "is only a part of the parameter")


@on_ranks(1)
def test_a_dtensor_is_not_taken_for_a_whole_parameter():
    initialize_megatron()
    model = nn.ModuleDict({"layer": nn.Linear(4, 8)})
    model.config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    chunk = wrap_ddp(model, use_distributed_optimizer=False)
    mesh = init_device_mesh("cpu", (1,))
    model["layer"].weight = nn.Parameter(distribute_tensor(model["layer"].weight.detach(), mesh))
    config = EmergingOptimizerConfig(optimizer="muon", use_distributed_optimizer=False)
    with pytest.raises(ConfigurationError, match=r"layer\.weight=.*is a DTensor"):
        get_megatron_optimizer(config, [chunk])


@pytest.mark.parametrize(
    ("layer", "declared", "fails"),
    [
        (nn.Linear(4, 8), None, False),
        (nn.Linear(4, 8), whole((8, 4)), False),
        (nn.Linear(4, 8), gated((8, 4)), True),
        (nn.Conv2d(2, 4, 2), whole((4, 8)), True),
    ],
    ids=["none", "one matrix", "two", "a folded one"],
)
@on_ranks(1)
def test_an_optimizer_that_does_not_split_refuses_declared_matrices(layer, declared, fails):
    initialize_megatron()
    model = nn.ModuleDict({"layer": layer})
    model.config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    if declared is not None:
        layer.weight.eopt_split = declared
    chunk = wrap_ddp(model, use_distributed_optimizer=False)
    config = EmergingOptimizerConfig(optimizer="soap", use_distributed_optimizer=False)
    told = pytest.raises(ConfigurationError, match="soap does not split parameters without")
    with told if fails else nullcontext():
        get_megatron_optimizer(config, [chunk])
