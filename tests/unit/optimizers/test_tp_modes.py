"""Layout invariance: the same gradients, cut in every way, give the same weights in every mode."""

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tests.unit.optimizers.tp_cases import CASES, cut, muon, step, weights

# Relative to the distance travelled, in float32. The differences are rounding in another order:
# sums over slabs, batched products, and the parts of the Gram iteration that they decide.
TOLERANCE = 2e-6
STEPS = (1, 5)


def errors_of_modes(modes, settings):
    """Return {(mode, steps): {case: (relative error, bit-equal)}} against one process."""
    size, rank = dist.get_world_size(), dist.get_rank()
    alone = muon(1, 0, "duplicated", **settings)
    group = dist.group.WORLD
    together = {mode: muon(size, rank, mode, group, **settings) for mode in modes}
    result = {}
    for number in range(1, max(STEPS) + 1):
        step(alone, number, 1, 0)
        for mode, optimizer in together.items():
            step(optimizer, number, size, rank)
            if number in STEPS:
                result[mode, number] = compare(weights(optimizer), weights(alone), size, rank)
    return result


def compare(ours, alone, size, rank):
    compared = {}
    for (name, case), mine, full in zip(CASES.items(), ours, alone, strict=True):
        want = cut(full, case, size, rank)
        error = torch.linalg.vector_norm(mine - want) / torch.linalg.vector_norm(want)
        compared[name] = (float(error), torch.equal(mine, want))
    return compared


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
    for by_mode in run_ranks(size, errors_of_modes, modes, settings):
        for (mode, number), compared in by_mode.items():
            for case, (error, _) in compared.items():
                assert error < tolerance, (mode, number, case)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_whole_matrices_are_bit_equal_without_batching(size):
    for by_mode in run_ranks(size, errors_of_modes, ["duplicated", "exchange"], {"batched": False}):
        for (mode, number), compared in by_mode.items():
            for case, (_, equal) in compared.items():
                assert equal, (mode, number, case)
