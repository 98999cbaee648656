"""Momentum in few bits in real storages: layouts, resuming, other dtypes, and other forms of state.

Gradients are injected and not clipped, so momentum, which depends on nothing else, has equal bits.
"""

import functools
from dataclasses import replace

import pytest
import torch
from torch import distributed

from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.unit.storage.full_state import Case, build, differences, full_state, load, save, steps
from tests.unit.storage.runs import DENSE, MOE, NORMUON
from tests.unit.storage.test_layouts import TOLERANCE

# 48 columns: tensor parallelism cuts inside of blocks of 32
MODEL = {**DENSE, "hidden": 48}
EXACT = {"muon_fp32_matmul_prec": "highest"}
DTYPES = ("bf16", "fp8", "int8")


def cases(model=MODEL, storage=True, dtypes=DTYPES, **parallel):
    where = {"use_distributed_optimizer": storage}
    found = []
    for dtype in dtypes:
        name, own = ("adaptive_muon", NORMUON) if dtype == "bf16" else ("muon", {})
        config = {**where, **EXACT, **own, "muon_momentum_dtype": dtype}
        found.append(Case(name, model, parallel, where, config))
    return found


def train(some: list[Case], count: int) -> list:
    """For each case do some steps; return the whole states."""
    states = []
    for case in some:
        chunk, optimizer = build(case)
        steps(case, chunk, optimizer, 0, count)
        dtypes = {
            values["momentum_buffer"].dtype
            for member in optimizer.chained_optimizers
            for values in member.optimizer.state.values()
            if "momentum_buffer" in values
        }
        assert len(dtypes) == 1, dtypes
        assert next(iter(dtypes)).itemsize < 4
        states.append(full_state(case, chunk, optimizer))
        forget_megatron()
    return states if distributed.get_rank() == 0 else []


def momenta(state: dict) -> dict:
    return {key: value for key, value in state.items() if "momentum_buffer" in key}


def check_same(found: list, expected: list) -> None:
    """Compare momenta bit by bit, and all weights up to what Newton-Schulz makes of rounding."""
    for state, other in zip(found, expected, strict=True):
        assert len(momenta(state)) >= 4
        assert not differences(momenta(state), momenta(other))
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and "momentum_buffer" not in key:
                # statistics of NorMuon follow from the same updates
                assert float((value - other[key]).norm() / other[key].norm()) < TOLERANCE, key


@functools.cache
def one_process(count: int) -> list:
    return run_ranks(1, train, cases(), count)[0]


@pytest.mark.parametrize(
    ("ranks", "parallel", "storage"),
    [
        pytest.param(4, {}, True, marks=pytest.mark.long),
        (4, {"tp": 2}, True),
        pytest.param(2, {"pp": 2}, True, marks=pytest.mark.long),
        (2, {"tp": 2}, False),
    ],
    ids=["DP 4", "TP 2 x DP 2", "PP 2", "TP 2 replicated"],
)
def test_momentum_is_the_same_to_the_bit_at_every_layout(ranks, parallel, storage):
    found = run_ranks(ranks, train, cases(storage=storage, **parallel), 3)[0]
    expected = one_process(3)
    if not storage:
        # main weights have another name there
        found, expected = [list(map(momenta, states)) for states in (found, expected)]
    check_same(found, expected)


def test_momentum_of_experts_is_the_same_to_the_bit():
    found = run_ranks(2, train, cases(MOE, dtypes=("int8",), ep=2), 3)[0]
    check_same(found, run_ranks(1, train, cases(MOE, dtypes=("int8",)), 3)[0])


@pytest.mark.long
@pytest.mark.parametrize("storage", [True, False], ids=["sharded", "plain"])
@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_a_checkpoint_loads_into_another_dtype(tmp_path, storage, dtype):
    # plain with main weights in float32
    model = MODEL if storage else {**MODEL, "dtype": torch.bfloat16}
    (few,) = cases(model, storage=storage, dtypes=(dtype,), tp=2)
    exact = replace(few, config={**few.config, "muon_momentum_dtype": "fp32"})
    for number, (writes, reads) in enumerate([(few, exact), (exact, few)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (before,) = run_ranks(2, save, [writes], str(folder))[0]
        (after,) = run_ranks(2, load, [reads], str(folder))[0]
        (later,) = run_ranks(2, load, [reads], str(folder), 1)[0]
        assert all(value.isfinite().all() for value in momenta(later).values())
        if reads is exact:
            assert not differences(momenta(before), momenta(after))
            continue
        for key, value in momenta(before).items():
            # bfloat16 has 8 bits; int8 at least 6 below the largest of a block
            assert (value - momenta(after)[key]).abs().max() <= value.abs().max() / 127
            assert not torch.equal(value, momenta(after)[key])
