"""Some steps with injected gradients: every sharding does what one process does."""

from types import SimpleNamespace

import pytest
import torch

from megatron_eopt.extending import MuonRule
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.wrappers.config import OptimizerConfig
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.unit.fsdp2.models import MATRICES, STEPS, config, far, make_model, stepped, trained

VARIANTS = {
    "muon": config(),
    "normuon": config("normuon"),
    "namo": config("namo"),
    "soap": config("soap"),
    "bf16 momentum": config(muon_momentum_dtype="bf16"),
    # these differ from those in nothing that the meshes have to do with
    "distributed": config(muon_tp_mode="distributed"),
    "adamuon": config("adamuon"),
    "lion": config("lion"),
    "adamw": config("adam"),
    "scion": config("scion"),
    "psgd_pro": config("psgd_pro"),
}
MAIN = list(VARIANTS)[:5]
UNITS = ["muon", "normuon", "soap", "adamw"]

# what one start of the ranks does: layouts with their optimizers
CELLS = {
    "torch, 2": {"fsdp": VARIANTS},
    "torch, 4": {"fsdp": MAIN, "hsdp": ["muon"], "tp": ["muon", "normuon"]},
    "torch's others, 4": {"hsdp": MAIN[1:], "tp": MAIN[2:]},
    "megatron, 2": {
        "optim": ["muon"],
        "optim_grads": ["muon"],
        "optim_grads_params": ["muon", "normuon", "soap", "adamw"],
        "no_shard": ["muon", "soap"],
    },
    "megatron, 4": {"optim_grads_params": ["muon"]},
    "megatron's replicas, 4": {
        "optim x 2": ["muon"],
        "optim_grads_params x 2": ["bf16 momentum", "soap"],
    },
    "megatron's units, 2": {"one unit": VARIANTS, "units": VARIANTS},
    "megatron's units, 3": {"one unit": ["muon"], "units": ["muon", "soap"]},
    "others in megatron's units, 3": {"one unit": MAIN[1:], "units": UNITS},
    "megatron's units, 4": {"units x 2": ["muon"]},
    "others in megatron's units, 4": {"one unit x 2": ["muon"], "units x 2": UNITS[1:]},
}
USUAL = ("torch, 4", "megatron's replicas, 4", "megatron's units, 3", "megatron's units, 4")
"""Muon in each framework, and in what it replicates; of torch's, all optimizers once."""


def train_all(cells):
    return {
        (layout, name): trained(layout, VARIANTS[name])
        for layout, names in CELLS[cells].items()
        for name in names
    }


@pytest.fixture(scope="module")
def unsharded():
    return {name: trained("plain", settings) for name, settings in VARIANTS.items()}


@pytest.mark.parametrize(
    "cells", [pytest.param(n, marks=[] if n in USUAL else pytest.mark.long) for n in CELLS]
)
def test_shards_equal_one_process(cells, unsharded):
    start = trained("plain", VARIANTS["muon"], steps=0)
    cpu, world = "torch" not in cells, int(cells[-1])
    for results in run_ranks(world, train_all, cells, cpu=cpu, timeout=280):
        for (layout, name), result in results.items():
            # owners may batch other matrices together, and batches may round differently
            assert far(result, unsharded[name])[0] < 2e-6, (layout, name)
            assert far(result, start)[0] > 0.01


def test_unsharded_equals_the_megatron_side(unsharded):
    settings, model = VARIANTS["normuon"], make_model()
    named = dict(model.named_parameters())
    given = {"lr": settings.lr, "weight_decay": settings.weight_decay, "moment2_method": "normuon"}
    given |= {"momentum": settings.muon_momentum, "nesterov": settings.muon_nesterov}
    given |= {"scale_mode": settings.muon_scale_mode, "fp32_matmul_prec": "highest"}
    given |= {"beta2": settings.adaptive_muon_beta2, "eps": settings.adaptive_muon_eps}
    muon = TensorParallelAdaptiveMuon([named.pop(name) for name in MATRICES], **given)
    decays = {"weight_decay": settings.weight_decay}
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], **decays},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    betas = (settings.adam_beta1, settings.adam_beta2)
    adam = torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.adam_eps)
    both = SimpleNamespace(step=lambda: (muon.step(), adam.step()))
    assert far(unsharded["normuon"], stepped(model, both, *range(STEPS)))[0] < 2e-6


def test_a_configuration_of_megatron_cores_class_works_too(unsharded):
    fields = {"lr": 0.02, "weight_decay": 0.1, "muon_fp32_matmul_prec": "highest"}
    fields |= {"muon_scale_mode": "adamw_rms", "muon_nesterov": True}  # the defaults of ours
    plain = OptimizerConfig(optimizer="muon", muon_tp_mode="duplicated", **fields)
    assert far(trained("plain", plain), unsharded["muon"])[0] < 2e-6


@on_ranks(4, cpu=False)
def test_the_replica_with_the_rank_that_computes_a_matrix_sends_it():
    optimizer, owners = build_optimizer(make_model("hsdp"), config()), set()
    for rule in (item.rule for item in optimizer.assigned if isinstance(item.rule, MuonRule)):
        layouts = [layout for shard in rule.shards for layout in shard.layouts]
        for layout, work in zip(layouts, rule.exchange.placements, strict=True):
            owner, boxes = int(work.compute.boxes.rank[0]), layout.boxes
            owners.add(owner)
            assert boxes.source[boxes.rank == owner].all()
    assert len(owners) > 2
