"""Every field of a configuration that changes a number does what it says, from there to a step.

Three steps of the optimizer that is built equal the same steps in float64 (``by_hand.py``).
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from megatron.core.optimizer import OptimizerConfig

from megatron_eopt import get_megatron_optimizer
from megatron_eopt.config.config import LIKE_MEGATRON
from megatron_eopt.math.orthogonalize import SCALE_MODES
from megatron_eopt.wrappers.config import EmergingOptimizerConfig
from tests.harness import run_ranks
from tests.harness.tiers import mostly_long
from tests.unit.storage.runs import DENSE, PLAIN, Run, inject, make_chunk
from tests.unit.wrappers.by_hand import Weights, compared

MUON: dict[str, Any] = {"optimizer": "muon", "lr": 0.05, "min_lr": 0.01, "weight_decay": 0.1}
MUON |= {"clip_grad": 0.0, "muon_fp32_matmul_prec": "highest"}
CLIPPED = MUON | {"clip_grad": 0.5}
ADAM, SGD, LION, SOAP = (MUON | {"optimizer": name} for name in ("adam", "sgd", "lion", "soap"))
SCALAR_SGD, SCALAR_LION = (MUON | {"muon_scalar_optimizer": name} for name in ("sgd", "lion"))
ADAMUON, NORMUON, NAMO = (
    MUON | {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": name}
    for name in ("adamuon", "normuon", "namo")
)
TRIPLES = ((3.0, -3.2, 1.2), (2.0, -1.5, 0.5))
CAUTIOUS = {"cautious_weight_decay": True, "weight_decay": 2.0}
PER_HEAD = {"muon_split_per_head": True}


class Case(NamedTuple):
    """A change of fields of a configuration, and what is allowed to deviate from it."""

    base: dict[str, Any]
    change: dict[str, Any]
    least: float = 0.0  # the least and the largest relative deviation from float64
    most: float = 5e-6
    is_rounding: bool = False  # whether it changes nothing but rounding
    chains_only: bool = False  # whether your own training loop clips, skips or schedules instead

    @property
    def is_in_own_loop(self) -> bool:
        """Whether it is tried there, too; other optimizers read their fields in the same way."""
        return not self.chains_only and self.base in (MUON, ADAM)


def named(*cases: Case) -> dict[str, Case]:
    short = [(MUON, "muon"), (ADAM, "adam"), (SGD, "sgd"), (LION, "lion"), (SOAP, "soap")]
    short += [(CLIPPED, "clipped"), (SCALAR_SGD, "scalar sgd"), (SCALAR_LION, "scalar lion")]
    short += [(ADAMUON, "adamuon"), (NORMUON, "normuon"), (NAMO, "namo")]
    return {
        f"{next(name for base, name in short if base is case.base)}: "
        + ", ".join(f"{field}={value}" for field, value in case.change.items()): case
        for case in cases
    }


ROUGH: dict[str, Any] = {"least": 1e-5, "most": 3e-2, "is_rounding": True}
ON_CHAINS: dict[str, Any] = {"chains_only": True}
# division by small second moments, and SOAP's bases, amplify rounding
AMPLIFIED = {"most": 5e-5}
CASES = named(
    # rates and their schedule
    Case(MUON, {"lr": 0.1}),
    Case(MUON, {"min_lr": 0.04}, **ON_CHAINS),
    Case(MUON, {"muon_lr": 0.02}),
    Case(MUON, {"muon_min_lr": 0.03}, **ON_CHAINS),
    Case(MUON, {"decoupled_lr": 0.2}),
    Case(MUON, {"decoupled_lr": 0.2, "decoupled_min_lr": 0.15}, **ON_CHAINS),
    Case(ADAM, {"lr": 0.1}),
    Case(ADAM, {"decoupled_lr": 0.2}),
    Case(NORMUON, {"muon_lr": 0.02}),
    # weight decay
    *(Case(base, {"weight_decay": 0.5}) for base in (MUON, ADAM, SGD, LION, NORMUON)),
    *(Case(base, {"muon_weight_decay": 0.5}) for base in (MUON, NORMUON)),
    *(Case(base, {"decoupled_weight_decay": False}) for base in (MUON, ADAM, LION, SCALAR_LION)),
    Case(ADAM, {"decoupled_weight_decay": False, "fused_adam": False}),
    *(Case(base, CAUTIOUS) for base in (MUON, ADAM, NORMUON, NAMO)),
    Case(ADAMUON, CAUTIOUS, **AMPLIFIED),
    Case(MUON, {"apply_wd_to_qk_layernorm": True}),
    # all gradients at once
    Case(MUON, {"clip_grad": 0.5}, **ON_CHAINS),
    Case(ADAM, {"clip_grad": 0.5}, **ON_CHAINS),
    Case(CLIPPED, {"muon_skip_grad_clip": True}, **ON_CHAINS),
    Case(CLIPPED, {"grad_norm_skip_threshold": 100.0}, **ON_CHAINS),
    Case(CLIPPED, {"loss_scale": 64.0}, is_rounding=True, **ON_CHAINS),
    # which optimizer a parameter gets
    Case(MUON, {"muon_scalar_optimizer": "sgd"}),
    Case(MUON, {"muon_scalar_optimizer": "lion"}),
    Case(MUON, {"muon_orthogonalize_router": False}),
    Case(MUON, {"muon_ignore_use_muon": True}),
    Case(MUON, {"muon_convolutions": True}),
    # which rows are a matrix
    *(
        Case(MUON, {f"muon_split_{kind}": False})
        for kind in ("qkv", "gated", "mla", "linear_attention")
    ),
    Case(MUON, PER_HEAD),
    Case(NORMUON, PER_HEAD),
    # Adam, SGD and Lion, for all parameters and for what is no matrix
    *(
        Case(base, {field: value})
        for base in (ADAM, MUON)
        for field, value in {"adam_beta1": 0.5, "adam_beta2": 0.6, "adam_eps": 0.1}.items()
    ),
    *(Case(base, {"sgd_momentum": 0.3}) for base in (SGD, SCALAR_SGD)),
    *(
        Case(base, {field: value})
        for base in (LION, SCALAR_LION)
        for field, value in {"lion_beta1": 0.3, "lion_beta2": 0.4}.items()
    ),
    # Muon's arithmetic
    Case(MUON, {"muon_momentum": 0.5}),
    Case(MUON, {"muon_nesterov": False}),
    Case(MUON, {"muon_num_ns_steps": 3}),
    *(Case(MUON, {"muon_coefficient_type": name}) for name in ("simple", "polar_express", "aol")),
    Case(MUON, {"muon_coefficient_type": TRIPLES}),
    *(Case(MUON, {"muon_scale_mode": name}) for name in SCALE_MODES if name != "adamw_rms"),
    Case(MUON, {"muon_extra_scale_factor": 0.5}),
    *(Case(MUON, {"muon_algorithm": n}, is_rounding=True) for n in ("standard", "gram")),
    Case(MUON, {"muon_backend": "emerging_optimizers"}, is_rounding=True),
    *(Case(base, {"fused_adam": False}, is_rounding=True) for base in (ADAM, MUON)),
    *(Case(base, {"optimizer_kernels": False}, is_rounding=True) for base in (ADAM, MUON)),
    Case(MUON, {"muon_use_syrk": True}, is_rounding=True),
    Case(MUON, {"muon_fp32_matmul_prec": "medium"}, **ROUGH),
    *(
        Case(base, {"muon_momentum_dtype": dtype}, **ROUGH)
        for base in (MUON, NORMUON)
        for dtype in ("bf16", "fp8", "int8")
    ),
    # second moments
    Case(NORMUON, {"adaptive_muon_moment2_method": "adamuon"}, **AMPLIFIED),
    Case(NORMUON, {"adaptive_muon_moment2_method": "namo"}),
    Case(NORMUON, {"muon_momentum": 0.5, "muon_nesterov": False}),
    Case(NORMUON, {"muon_scale_mode": "unit_rms_norm", "muon_extra_scale_factor": 0.5}),
    *(Case(base, {"adaptive_muon_beta2": 0.5}) for base in (ADAMUON, NORMUON, NAMO)),
    *(Case(base, {"adaptive_muon_eps": 0.1}) for base in (ADAMUON, NORMUON, NAMO)),
    *(Case(base, {"adaptive_muon_bias_correction": True}) for base in (ADAMUON, NAMO)),
    # SOAP
    Case(SOAP, {"soap_shampoo_beta": 0.5}, **AMPLIFIED),
    Case(SOAP, {"soap_use_kl_shampoo": False}, **AMPLIFIED),
    Case(SOAP, {"adam_beta1": 0.5, "adam_beta2": 0.6}, **AMPLIFIED),
)


UNCHANGED = "muon_tp_mode matrix_buffer_mb muon_max_ranks_per_matrix muon_overlap_dp_comm".split()
"""Fields that say where and when updates are computed; tests of layouts compare their values."""


def test_no_field_of_ours_is_forgotten():
    tried = {field for case in CASES.values() for field in case.base | case.change}
    of_megatron = {field.name for field in dataclasses.fields(OptimizerConfig)}
    ours = {field.name for field in dataclasses.fields(EmergingOptimizerConfig)} - of_megatron
    ours |= LIKE_MEGATRON.keys() | {"muon_coefficient_type"}
    numeric = {name for name in ours if not name.startswith(("ckpt", "checkpoint", "print", "log"))}
    assert numeric - tried == set(UNCHANGED)


STORAGES = ("replicated", "sharded", "own loop")


def far(ours: Weights, theirs: Weights) -> dict[str, float]:
    """Return the relative distance of each weight."""
    return {
        name: float(np.linalg.norm(ours[name] - weight) / np.linalg.norm(weight))
        for name, weight in theirs.items()
    }


@pytest.mark.parametrize("storage", mostly_long(STORAGES, "sharded", "own loop"))
def test_a_field_does_what_it_says(storage):
    cases = {n: c for n, c in CASES.items() if storage != "own loop" or c.is_in_own_loop}
    bases = {id(case.base): case.base for case in cases.values()}
    runs = [*bases.values(), *(case.base | case.change for case in cases.values())]
    results = run_ranks(1, compared, storage, runs, timeout=300)[0]
    promised = dict(zip(bases, (by_hand for by_hand, _ in results), strict=False))
    wrong = {}
    for (name, case), (by_hand, found) in zip(cases.items(), results[len(bases) :], strict=True):
        deviation = max(far(found, by_hand).values())
        if not case.least <= deviation <= case.most:
            wrong[name] = deviation
        # what a wrong field would change is more than what rounding does
        change = max(far(by_hand, promised[id(case.base)]).values())
        assert case.is_rounding or change > 20 * case.most, (name, change)
    assert not wrong


SCALED = {"initial_loss_scale": 1024.0, "min_loss_scale": 64.0}
SCALED |= {"loss_scale_window": 2, "hysteresis": 1}
SCALES = [
    SCALED,
    SCALED | {"initial_loss_scale": 4096.0},
    SCALED | {"min_loss_scale": 512.0},
    SCALED | {"loss_scale_window": 3},
    SCALED | {"hysteresis": 2},
]
OVERFLOWS = (False, False, True, True, True, True, False, True, False, False, False, False)


def stepped_with(fields: dict[str, Any]) -> list[tuple[bool, float]]:
    """Return, for each step in float16, whether it was done, and the loss scale then."""
    run = Run(model={**DENSE, "layers": 1, "dtype": torch.float16}, ddp=PLAIN)
    chunk = make_chunk(run)
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.01, min_lr=0.0, fp16=True, **fields)
    optimizer = get_megatron_optimizer(config, [chunk])
    told = []
    for step, overflows in enumerate(OVERFLOWS):
        optimizer.zero_grad()
        inject(run, chunk, step)
        if overflows:
            next(chunk.parameters()).main_grad.view(-1)[0] = torch.inf
        done, *_ = optimizer.step()
        told.append((done, float(optimizer.get_loss_scale())))
    return told


def scales_by_hand(fields: dict[str, Any]) -> list[tuple[bool, float]]:
    scale, good, patience = fields["initial_loss_scale"], 0, fields["hysteresis"]
    told = []
    for overflows in OVERFLOWS:
        good, patience = (0, patience - 1) if overflows else (good + 1, patience)
        if overflows and patience <= 0:
            scale = max(scale / 2, fields["min_loss_scale"])
        elif good == fields["loss_scale_window"]:
            scale, good, patience = scale * 2, 0, fields["hysteresis"]
        told.append((not overflows, scale))
    return told


def test_the_fields_of_a_dynamic_loss_scale_do_what_they_say():
    promised = [scales_by_hand(fields) for fields in SCALES]
    assert all(other != promised[0] for other in promised[1:])
    assert [run_ranks(1, stepped_with, fields)[0] for fields in SCALES] == promised
    constant = run_ranks(1, stepped_with, SCALED | {"loss_scale": 32.0})[0]
    assert constant == [(not overflows, 32.0) for overflows in OVERFLOWS]
