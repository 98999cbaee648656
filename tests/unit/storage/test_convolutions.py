"""Convolutions and transposed weights are updated alike in all of Megatron's storages."""

import pytest

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.fsdp2 import build_optimizer
from tests.harness import run_ranks
from tests.unit.fsdp2.models import eager, far, stepped
from tests.unit.fsdp2.models import weights as weights_of
from tests.unit.storage.foreign import FIELDS, STORAGES, Foreign, built, step, weights, wrapped

HOW = {"muon_convolutions": True, "muon_scale_mode": "unit_rms_norm"}


@eager
def trained(storage):
    chunk = wrapped(storage, Foreign().declare())
    step(storage, chunk, built(storage, chunk, **HOW))
    return weights(chunk)


@eager
def alone():
    model = Foreign().declare()
    config = EmergingOptimizerConfig(**FIELDS, **HOW, muon_fp32_matmul_prec="highest")
    optimizer = build_optimizer(model, config, output_layers=())
    return stepped(model, optimizer, 0, 1, 2)


@pytest.mark.parametrize("storage", STORAGES)
def test_all_storages_give_the_update_of_one_process(storage):
    one, start = alone(), weights_of(Foreign())
    assert all(far({n: one[n]}, {n: start[n]})[0] > 1e-3 for n in ("conv.weight", "turned.weight"))
    for found in run_ranks(2, trained, storage):
        assert far(found, one)[0] < 5e-6
