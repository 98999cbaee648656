"""Ten steps with injected gradients: every sharding does what one process does."""

import pytest
import torch

from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.settings.config import OptimizerConfig
from tests.harness import run_ranks
from tests.unit.fsdp2.model import (
    MATRICES,
    STEPS,
    config,
    far,
    make_model,
    set_gradients,
    trained,
    weights,
)

LAYOUTS = {2: ["fsdp"], 4: ["fsdp", "hsdp", "tp"]}
# the others differ from these in nothing that the meshes have to do with
IN_EVERY_LAYOUT = ("muon", "normuon", "namo", "soap")

VARIANTS = {
    "muon": config(),
    "distributed": config(muon_tp_mode="distributed"),
    "adamuon": config("adaptive_muon", adaptive_muon_moment2_method="adamuon"),
    "normuon": config("adaptive_muon", adaptive_muon_moment2_method="normuon"),
    "namo": config("adaptive_muon", adaptive_muon_moment2_method="namo"),
    "soap": config("soap"),
    "lion": config("lion"),
    "adamw": config("adam"),
    "scion": config("scion"),
    "psgd_pro": config("psgd_pro"),
}


def train_all(world):
    return {
        (layout, name): trained(layout, settings)
        for layout in LAYOUTS[world]
        for name, settings in VARIANTS.items()
        if name in IN_EVERY_LAYOUT or (layout, world) == ("fsdp", 4)
    }


@pytest.fixture(scope="module")
def unsharded():
    return {name: trained("plain", settings) for name, settings in VARIANTS.items()}


@pytest.mark.parametrize(
    "world", [pytest.param(n, marks=pytest.mark.long if n == 2 else []) for n in LAYOUTS]
)
def test_shards_equal_one_process(world, unsharded):
    start = weights(make_model())
    for results in run_ranks(world, train_all, world, cpu=False, timeout=120):
        for (layout, name), result in results.items():
            # owners may batch other matrices together, and batches may round differently
            assert far(result, unsharded[name])[0] < 2e-6, (layout, name)
            assert far(result, start)[0] > 0.01


def megatron_side(settings, cls, **kwargs):
    """Step our Megatron optimizer and torch's AdamW on the same weights."""
    model = make_model()
    named = dict(model.named_parameters())
    muon = cls(
        [named[name] for name in MATRICES],
        lr=settings.lr,
        momentum=settings.muon_momentum,
        nesterov=settings.muon_nesterov,
        weight_decay=settings.weight_decay,
        fp32_matmul_prec="highest",
        scale_mode=settings.muon_scale_mode,
        extra_scale_factor=settings.muon_extra_scale_factor,
        **kwargs,
    )
    rest = [param for name, param in named.items() if name not in MATRICES]
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.dim() > 1]},
            {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
    )
    for step in range(STEPS):
        set_gradients(model, step)
        muon.step()
        adam.step()
    return weights(model)


def test_unsharded_equals_the_megatron_side(unsharded):
    theirs = megatron_side(VARIANTS["muon"], TensorParallelMuon)
    assert far(unsharded["muon"], theirs)[0] < 2e-6


@pytest.mark.parametrize("method", ["adamuon", "normuon", "namo"])
def test_unsharded_adaptive_equals_the_megatron_side(method, unsharded):
    settings = VARIANTS[method]
    theirs = megatron_side(
        settings,
        TensorParallelAdaptiveMuon,
        moment2_method=method,
        beta2=settings.adaptive_muon_beta2,
        eps=settings.adaptive_muon_eps,
    )
    assert far(unsharded[method], theirs)[0] < 2e-6


def test_a_configuration_of_megatron_cores_class_works_too(unsharded):
    fields = {"lr": 0.02, "weight_decay": 0.1, "muon_fp32_matmul_prec": "highest"}
    plain = OptimizerConfig(optimizer="muon", muon_tp_mode="duplicated", **fields)
    assert far(trained("plain", plain), unsharded["muon"])[0] < 2e-6
