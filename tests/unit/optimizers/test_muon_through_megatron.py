"""One step through real Megatron (model, DDP, schedule, factory) against float64."""

import pytest

from benchmarks.gpu_check.sections.reference import deviations
from tests.harness import run_ranks

# Relative to the step taken. Five float32 iterations amplify rounding errors by the slope at zero,
# up to 1e3 for the smallest singular values: 1e-5 leaves a margin of 2, and 0.25 of bfloat16, too.
TOLERANCES = {"fp32": 1e-5, "bf16": 0.25}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_step_equals_the_float64_reference(ranks, dtype):
    for errors in run_ranks(ranks, deviations, dtype):
        assert len(errors) > 8
        for name, error in errors.items():
            assert error < TOLERANCES[dtype], name
