"""Layout invariance: the same gradients, cut in every way, give the same weights in every mode."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.matrices import Split, gated, qkv, whole
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.muon import TensorParallelMuon
from tests.harness import run_ranks


@dataclass(frozen=True)
class Case:
    """A parameter: its logical matrices, which dimension is cut, whether it is an expert's."""

    split: Split
    dim: int
    expert: bool = False


CASES = {
    "tall, rows cut": Case(whole((96, 32)), 0),
    "tall, columns cut": Case(whole((96, 32)), 1),
    "wide, rows cut": Case(whole((32, 96)), 0),
    "wide, columns cut": Case(whole((32, 96)), 1),
    "square, rows cut": Case(whole((48, 48)), 0),
    "square, columns cut": Case(whole((48, 48)), 1),
    "not cut": Case(whole((40, 48)), -1),
    "qkv": Case(qkv((128, 48), (16, 8, 8)), 0),
    "qkv, output gate": Case(qkv((192, 48), (16, 16, 8, 8)), 0),
    # with four ranks, two of them begin inside a query group
    "qkv, two query groups": Case(qkv((96, 48), (32, 8, 8)), 0),
    # with two ranks the first has all of Q, and the second K and V
    "qkv, one query group": Case(qkv((64, 48), (32, 16, 16)), 0),
    "qkv per head": Case(qkv((128, 48), (16, 8, 8), head_dim=8), 0),
    "gated fc1": Case(gated((128, 32)), 0),
    "gated fc1, interleaved": Case(gated((128, 32), interleave=16), 0),
    "expert fc1": Case(gated((128, 32)), 0, expert=True),
    "expert fc2": Case(whole((32, 64)), 1, expert=True),
    "experts in one fc1": Case(gated((3, 128, 32)), 0, expert=True),
    "experts in one fc2": Case(whole((3, 32, 64)), 1, expert=True),
}


def cut(full: torch.Tensor, case: Case, size: int, rank: int) -> torch.Tensor:
    """Return the rank's slab: an equal part of every section, one below the other."""
    if case.dim == -1:
        return full.clone()
    if case.dim == 1:
        return full.chunk(size, -1)[rank].contiguous()
    sections = full.split([section.rows for section in case.split.sections], -2)
    return torch.cat([section.chunk(size, -2)[rank] for section in sections], -2)


def muon(
    size: int, rank: int, mode: str, group: dist.ProcessGroup | None = None, **settings: Any
) -> TensorParallelMuon:
    """Return Muon over this rank's slabs of all cases, all weights zero; whole without a group.

    With a method of second moments it is adaptive Muon.
    """
    params = []
    for name, case in CASES.items():
        param = torch.nn.Parameter(cut(torch.zeros(case.split.shape), case, size, rank))
        param.partition_dim = -1 if group is None else case.dim
        param.tensor_model_parallel = case.dim != -1
        param.allreduce = not case.expert
        params.append((name, param))
    cls = TensorParallelAdaptiveMuon if "moment2_method" in settings else TensorParallelMuon
    splits = {param: case.split for (_, param), case in zip(params, CASES.values(), strict=True)}
    settings |= {"lr": 0.1, "fp32_matmul_prec": "highest", "tp_mode": mode, "splits": splits}
    return cls(params, pg_collection=SimpleNamespace(tp=group, expt_tp=group), **settings)


def step(optimizer: TensorParallelMuon, number: int, size: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for param, case in zip(optimizer.param_groups[0]["params"], CASES.values(), strict=True):
        param.grad = cut(torch.randn(case.split.shape, generator=generator), case, size, rank)
    optimizer.step()


def weights(optimizer: TensorParallelMuon) -> list[torch.Tensor]:
    return [param.detach() for param in optimizer.param_groups[0]["params"]]


# Relative to the distance travelled, in float32. The differences are rounding in another order:
# sums over slabs, batched products, and the parts of the Gram iteration that they decide.
TOLERANCE = 2e-6
STEPS = (1, 5)


def check_modes(modes, settings, tolerance):
    """Compare each mode with one process, bit by bit without a tolerance."""
    size, rank = dist.get_world_size(), dist.get_rank()
    alone = muon(1, 0, "duplicated", **settings)
    group = dist.group.WORLD
    together = {mode: muon(size, rank, mode, group, **settings) for mode in modes}
    for number in range(1, max(STEPS) + 1):
        step(alone, number, 1, 0)
        for mode, optimizer in together.items():
            step(optimizer, number, size, rank)
            for (name, case), mine, full in zip(
                CASES.items(), weights(optimizer), weights(alone), strict=True
            ):
                want = cut(full, case, size, rank)
                if tolerance is None:
                    assert torch.equal(mine, want), (mode, number, name)
                elif number in STEPS:
                    error = torch.linalg.vector_norm(mine - want) / torch.linalg.vector_norm(want)
                    assert error < tolerance, (mode, number, name)


NORMUON, NAMO, ADAMUON = (
    {"moment2_method": name, "bias_correction": True} for name in ("normuon", "namo", "adamuon")
)


MODES = ["duplicated", "exchange", "distributed", "auto"]
IN_WAVES = {**NORMUON, "matrix_buffer_mb": 1e-3}  # of one matrix each


@pytest.mark.parametrize(
    ("size", "modes", "settings", "tolerance"),
    [
        (2, MODES, {}, TOLERANCE),
        pytest.param(4, MODES, {}, TOLERANCE, marks=pytest.mark.long),
        pytest.param(2, MODES, NORMUON, TOLERANCE, marks=pytest.mark.long),
        (2, ["exchange"], IN_WAVES, TOLERANCE),
        pytest.param(2, MODES, IN_WAVES, TOLERANCE, marks=pytest.mark.long),
        pytest.param(2, MODES, NAMO, TOLERANCE, marks=pytest.mark.long),
        # the smallest entries of its updates have the length of all others: 4e-6 are seen
        pytest.param(2, MODES, ADAMUON, 1e-5, marks=pytest.mark.long),
    ],
    ids=["2", "4", "NorMuon", "NorMuon in waves", "all in waves", "NAMO", "AdaMuon"],
)
def test_every_exact_mode_gives_what_one_process_gives(size, modes, settings, tolerance):
    run_ranks(size, check_modes, modes, settings, tolerance)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_whole_matrices_are_bit_equal_without_batching(size):
    run_ranks(size, check_modes, ["duplicated", "exchange"], {"batched": False}, None)
