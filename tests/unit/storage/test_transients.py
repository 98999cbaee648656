"""What a step holds beside weights, gradients and state: bounded by waves, not by the model."""

from typing import Any
from unittest.mock import patch

import pytest

from megatron_eopt.base.live_bytes import LiveBytes
from megatron_eopt.math import newton_schulz
from tests.harness import run_ranks
from tests.unit.storage.full_state import Case, build, inject, steps
from tests.unit.storage.runs import NORMUON

WAVE_MB = 1 / 16
WAVE = int(WAVE_MB * 2**20)
HIDDEN = 64
LARGEST = 4 * HIDDEN * HIDDEN * 4
"""Bytes of the up projection, in float32."""

ITERATION = 3 * LARGEST
"""Bytes that the iteration needs."""

FACTOR = (4 * HIDDEN) ** 2 * 4
"""Bytes of the larger of SOAP's Kronecker factors of that matrix."""

BUFFERS = 16 << 10
"""Norms, factors and counters, whose number depends on the model, but not on its matrices."""

MODEL = {"hidden": HIDDEN, "heads": 4, "bias": False, "vocabulary": 64}
MOE = {**MODEL, "experts": 4, "moe_grouped_gemm": False}


def peak(case: Case) -> int:
    """Return the most bytes by which tensors grow in a step; the first makes what lives on."""
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 1)
    optimizer.zero_grad()
    inject(case.run, chunk, 1)
    # as on a GPU, where no product is widened
    with patch.object(newton_schulz, "is_widened", lambda *_: False), LiveBytes() as seen:
        optimizer.step()
    return seen.peak


def peaks(
    optimizer: str, ranks: int, storage: bool, model: dict[str, Any], **fields: Any
) -> list[int]:
    """Return the largest peak of any rank with two and with eight layers."""
    where = {"use_distributed_optimizer": storage}
    config = {**where, "matrix_buffer_mb": WAVE_MB, **fields}
    parallel = {"ep": 2} if "experts" in model else {}
    cases = [
        Case(optimizer, {**model, "layers": layers}, parallel=parallel, ddp=where, config=config)
        for layers in (2, 8)
    ]
    return [max(run_ranks(ranks, peak, case)) for case in cases]


STORAGES = pytest.mark.parametrize(
    "storage", [True, pytest.param(False, marks=pytest.mark.long)], ids=["sharded", "replicated"]
)


@pytest.mark.parametrize(
    ("optimizer", "ranks", "storage", "model", "fields"),
    [
        ("muon", 2, True, MODEL, {}),
        pytest.param("muon", 2, True, MOE, {}, marks=pytest.mark.long),
        ("adaptive_muon", 2, False, MODEL, NORMUON),
    ],
    ids=["DP 2", "experts", "NorMuon replicated"],
)
def test_muons_step_holds_two_waves_and_the_iteration(optimizer, ranks, storage, model, fields):
    found = peaks(optimizer, ranks, storage, model, **fields)
    assert max(found) <= 2 * WAVE + ITERATION + BUFFERS


@STORAGES
def test_an_owners_step_holds_two_waves_and_what_its_optimizer_needs_for_one_matrix(storage):
    few, many = peaks("soap", 2, storage, MODEL)
    assert max(few, many) <= 2 * WAVE + 3 * LARGEST + 5 * FACTOR
    assert many <= few + BUFFERS


ROUNDING = 56 * (LARGEST // 4)
"""Indices, noise and what else rounding needs for each element of the matrix that it works on."""


@STORAGES
def test_of_momentum_in_8_bits_no_more_than_a_wave_is_float32(storage):
    few, many = peaks("muon", 2, storage, MODEL, muon_momentum_dtype="int8")
    # the first wave's momenta, and one matrix that is rounded
    assert max(few, many) <= 3 * WAVE + ITERATION + ROUNDING + BUFFERS
    # eight layers fill their waves better; all that they have more in float32 is seven waves a rank
    assert many <= few + WAVE + BUFFERS


@pytest.mark.parametrize("storage", [True, False], ids=["sharded", "replicated"])
@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_clipping_scales_gradients_where_they_are(optimizer, storage):
    where: dict[str, Any] = {"use_distributed_optimizer": storage}
    plain, clipped = (
        run_ranks(1, peak, Case(optimizer, MODEL, ddp=where, config={**where, "clip_grad": limit}))
        for limit in (0.0, 1e-3)
    )
    assert clipped[0] <= plain[0] + BUFFERS
