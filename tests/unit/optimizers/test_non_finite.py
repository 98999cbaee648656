"""Gradients that are not finite, given to Muon without Megatron's wrappers."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.math import NonFiniteError
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.muon import TensorParallelMuon
from tests.harness import run_ranks

MODES = ("duplicated", "exchange", "distributed", "blockwise", "auto")


def make(cls, mode, tp, expert_tp=None, dtype=torch.float32, **settings):
    """Return an optimizer over a cut matrix, an expert's, and one that is whole on every rank."""
    params = []
    for name, dim, expert in (("cut", 0, False), ("expert", 1, True), ("whole", -1, False)):
        param = torch.nn.Parameter(torch.ones(8, 12, dtype=dtype))
        param.partition_dim, param.tensor_model_parallel = dim, dim != -1
        param.allreduce = not expert
        params.append((name, param))
    groups = SimpleNamespace(tp=tp, expt_tp=expert_tp or tp)
    return cls(params, tp_mode=mode, pg_collection=groups, **settings)


def give(optimizer, seed, bad=None, value=math.nan, factor=1.0):
    """Set gradients; put ``value`` into the one at place ``bad``, multiply all."""
    generator = torch.Generator().manual_seed(seed + 10 * dist.get_rank())
    for number, param in enumerate(optimizer.param_groups[0]["params"]):
        param.grad = (factor * torch.randn(param.shape, generator=generator)).to(param.dtype)
        if number == bad:
            param.grad[-1, -1] = value


def copy(optimizer):
    tensors = list(optimizer.param_groups[0]["params"])
    for state in list(optimizer.state.values()):
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in tensors]


def refused(cls, settings, group_ranks=None):
    """Poison each parameter on each rank in turn; return what this rank saw."""
    world, rank = dist.group.WORLD, dist.get_rank()
    # every rank makes all groups
    expert_groups = [dist.new_group(ranks) for ranks in group_ranks or ()]
    expert = expert_groups[rank // 2] if expert_groups else world
    seen = []
    for mode in MODES:
        optimizer = make(cls, mode, world, expert, **settings)
        give(optimizer, 0)
        optimizer.step()
        before = copy(optimizer)
        for number in range(3):
            for sick in range(dist.get_world_size()):
                give(optimizer, 1, number if sick == rank else None)
                try:
                    optimizer.step()
                    names = []
                except NonFiniteError as error:
                    names = error.names
                same = all(map(torch.equal, before, copy(optimizer)))
                seen.append((mode, number, names, same))
        give(optimizer, 1)
        optimizer.step()
        seen.append((mode, None, [], not torch.equal(before[0], copy(optimizer)[0])))
    return seen


NAMES = {0: ["cut"], 1: ["expert"], 2: ["whole"], None: []}


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (TensorParallelMuon, {}),
        (TensorParallelAdaptiveMuon, {"moment2_method": "adamuon", "bias_correction": True}),
        (TensorParallelAdaptiveMuon, {"moment2_method": "normuon"}),
        (TensorParallelAdaptiveMuon, {"moment2_method": "namo"}),
    ],
    ids=["muon", "adamuon", "normuon", "namo"],
)
def test_every_rank_of_the_group_raises_with_the_same_name(cls, settings):
    for seen in run_ranks(2, refused, cls, settings):
        assert len(seen) == len(MODES) * 7
        for mode, number, names, right in seen:
            assert names == NAMES[number], (mode, number)
            assert right, (mode, number)


def test_experts_that_are_cut_over_fewer_ranks_stop_all_the_others():
    for seen in run_ranks(4, refused, TensorParallelMuon, {}, [[0, 1], [2, 3]]):
        for mode, number, names, right in seen:
            assert names == NAMES[number], (mode, number)
            assert right, (mode, number)


def huge(cls, settings):
    """Step with gradients far outside of what squares fit into float32; return the extremes."""
    extremes = {}
    for mode in MODES:
        for dtype in (torch.float32, torch.bfloat16):
            optimizer = make(cls, mode, dist.group.WORLD, dtype=dtype, **settings)
            for step in range(3):
                # one rank's alone are large enough to look like inf
                give(optimizer, step, factor=1e30 if dist.get_rank() == 1 else 1.0)
                optimizer.step()
            weights = [param.float() for param in optimizer.param_groups[0]["params"]]
            extremes[mode, str(dtype)] = max(float(w.abs().max()) for w in weights)
            assert all(w.isfinite().all() for w in weights), (mode, dtype)
    return extremes


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (TensorParallelMuon, {}),
        (TensorParallelAdaptiveMuon, {"moment2_method": "adamuon"}),
        (TensorParallelAdaptiveMuon, {"moment2_method": "normuon"}),
        (TensorParallelAdaptiveMuon, {"moment2_method": "namo"}),
    ],
    ids=["muon", "adamuon", "normuon", "namo"],
)
def test_finite_but_huge_gradients_leave_finite_weights(cls, settings):
    for extremes in run_ranks(2, huge, cls, settings):
        assert len(extremes) == 2 * len(MODES)
        # three steps of at most lr * sqrt(8) or so away from one
        assert max(extremes.values()) < 1.1
