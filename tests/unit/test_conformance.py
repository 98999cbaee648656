"""The public conformance test: our optimizers and storages pass it, and faulty ones fail."""

import functools

import pytest

from megatron_eopt import conformance
from tests.harness import run_ranks
from tests.harness.models import wrap_ddp, wrap_fsdp2

check = functools.partial(conformance.check, run=run_ranks)

OPTIMIZERS = {
    "muon": ("muon", {}),
    "muon in 8 bits": ("muon", {"muon_momentum_dtype": "int8"}),
    "adamuon": ("adaptive_muon", {"adaptive_muon_moment2_method": "adamuon"}),
    "normuon": ("adaptive_muon", {"adaptive_muon_moment2_method": "normuon"}),
    "namo": ("adaptive_muon", {"adaptive_muon_moment2_method": "namo"}),
    # the last bit of a factor that clips turns eigenbases, which makes another update
    "soap": ("soap", {"clip_grad": 0.0}),
    "lion": ("lion", {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_our_optimizers_conform(name):
    optimizer, config = OPTIMIZERS[name]
    check(optimizer, config)


def copied(model):
    """Store a copy on each rank."""
    return wrap_ddp(model, use_distributed_optimizer=False)


@pytest.mark.parametrize(
    ("storage", "optimizer", "config"),
    [(copied, "muon", {}), (wrap_fsdp2, "muon", {}), (wrap_fsdp2, "soap", {"clip_grad": 0.0})],
)
def test_our_storages_conform(storage, optimizer, config):
    check(optimizer, {"use_distributed_optimizer": False, **config}, storage=storage)
