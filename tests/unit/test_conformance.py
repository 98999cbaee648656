"""The public conformance test: our optimizers and storages pass it, and faulty ones fail."""

import functools

import pytest

from megatron_eopt import conformance
from tests.harness import run_ranks

check = functools.partial(conformance.check, run=run_ranks)

OPTIMIZERS = {
    "muon": {},
    "adaptive_muon": {},
    # its eigenbases turn the last bit of a factor that clips into another update
    "soap": {"clip_grad": 0.0},
    "lion": {},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_our_optimizers_conform(optimizer):
    check(optimizer, OPTIMIZERS[optimizer])
