"""Every setting of an override changes the update of exactly its parameters, or is refused."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.optimizer import ParamKey
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig, get_megatron_optimizer
from megatron_eopt.config.fields import constructor_parameters
from megatron_eopt.config.registry import entries, optimizer_names
from megatron_eopt.megatron_fsdp import build_optimizer
from megatron_eopt.optimizers.element_wise import AdamW
from megatron_eopt.routing.routes import read_overrides
from megatron_eopt.wrappers.factory import as_megatron_cores
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import tiny_gpt, wrap_ddp, wrap_fsdp2
from tests.harness.tiers import mostly_long
from tests.unit.fsdp2.models import cut, eager, named, shard, whole
from tests.unit.megatron_fsdp.runs import wrap as wrap_megatron_fsdp

SHAPE, STEPS = (8, 6), 3
RATES = {"lr": 0.05, "max_lr": 0.05, "lr_mult": 0.5, "weight_decay": 0.9, "wd_mult": 3.0}
SCHEDULED = {"min_lr": 0.015, "start_wd": 0.0, "end_wd": 0.9}
ARGUMENTS: dict[str, Any] = {
    "betas": (0.5, 0.6),
    "momentum": 0.3,
    "eps": 0.1,
    "scale_mode": "unit_rms_norm",
    "coefficient_type": "simple",
    "fp32_matmul_prec": "medium",
    "weight_decay_method": "l2",
    "cautious_weight_decay": True,
    "use_decoupled_weight_decay": False,
    "momentum_dtype": "int8",
    "moment2_method": "namo",
    "num_ns_steps": 2,
    "nesterov": True,
    "extra_scale_factor": 0.5,
    "ns_eps": 0.5,
    "beta2": 0.3,
    "bias_correction": True,
    "correct_bias": False,
    "frob_normalize": True,
    "amsgrad": True,
    "maximize": True,
    "dampening": 0.5,
    "hyperball_radius": 3.0,
    "hyperball_eps": 5.0,
    "spectral_radius": 2.0,
    "shampoo_beta": 0.3,
    "correct_shampoo_beta_bias": False,
    "max_update_rms": 1e-3,
    "power_iter_steps": 9,
    "use_eigh": True,
    "use_kl_shampoo": True,
    "damping_noise_scale": 0.5,
    "precond_init_scale": 3.0,
    "precond_lr": 0.9,
    "min_precond_lr": 0.95,
    "warmup_steps": 1,
    "dim": 1,
}
"""A value for each constructor argument that is not the configuration's."""

REFUSED = {
    *("split_qkv", "is_qkv_fn", "qkv_split_shapes", "splits", "tp_mode", "batched", "stream_list"),
    *("matrix_buffer_mb", "pg_collection", "foreach", "fused", "capturable", "differentiable"),
    *("params", "is_expert_parallel", "default_config", "is_decoupled_lr", "foo", "momentun"),
}
UNSEEN = {
    ("*", "algorithm"), ("*", "backend"), ("*", "use_syrk"),  # other roundings
    ("*", "qr_fp32_matmul_prec"), ("*", "beta_lip"),
    *((name, "fp32_matmul_prec") for name in ("mop", "scion", "soap", "spel")),  # on GPUs
    ("*", "hyperball_radius"), ("*", "hyperball_eps"),  # bounds of norms
    ("muon_hyperball", "scale_mode"), ("muon_hyperball", "extra_scale_factor"),  # normalized away
    ("oblique_sgd", "eps"), ("adaptive_muon", "bias_correction"),
    *((f"oblique_{name}", "weight_decay_method") for name in ("adam", "sgd")),
    *(("sinkhorn_muon", name) for name in ("eps", "wd_mult", "weight_decay", *SCHEDULED)),
}  # fmt: skip
"""Settings that are used, but change next to nothing here."""


class Case(NamedTuple):
    """One matrix: its optimizer and the setting, without one for a matrix to compare with."""

    optimizer: str
    setting: str | None
    value: Any = None

    @property
    def override(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer} | ({self.setting: self.value} if self.setting else {})


def cases(*, scheduled: bool) -> list[Case]:
    """Return all settings of all optimizers; a last one without any shows that others rest."""
    found = []
    standard = {"adam": AdamW, "sgd": torch.optim.SGD}
    for optimizer in optimizer_names():
        cls = standard.get(optimizer) or entries()[optimizer].optimizer_cls
        taken = constructor_parameters(cls)
        values = RATES | (SCHEDULED if scheduled else {})
        values |= {name: ARGUMENTS[name] for name in taken if name in ARGUMENTS}
        found += [Case(optimizer, None)]
        found += [
            Case(optimizer, name, value)
            for name, value in values.items()
            if not {(optimizer, name), ("*", name)} & UNSEEN
        ]
        found += [Case(optimizer, None)]
    return found


class Matrices(nn.Module):
    """One matrix for each case, equal for equal optimizers."""

    def __init__(self, wanted: list[Case]) -> None:
        super().__init__()
        self.config = tiny_gpt(layers=1).config if parallel_state.is_initialized() else None
        first = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
        doubly_stochastic = torch.full(SHAPE, 1 / min(SHAPE))
        self.m = nn.ModuleList(nn.Linear(*SHAPE[::-1], bias=False) for _ in wanted)
        for module, case in zip(self.m, wanted, strict=True):
            value = doubly_stochastic if case.optimizer == "sinkhorn_muon" else first
            module.weight.data.copy_(value)


def gradient(step: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1 + step))


OWN = {"plain": "plain", "fsdp": "fsdp", "megatron_fsdp": "optim_grads"}
"""Storages of your own training loop, with their names in ``cut``."""

CHAINS: Mapping[str, tuple[Any, dict[str, bool]]] = {
    "replicated": (wrap_ddp, {"use_distributed_optimizer": False}),
    "sharded": (wrap_ddp, {"use_distributed_optimizer": True}),
    "trainer_fsdp": (wrap_fsdp2, {}),
    "trainer_megatron_fsdp": (
        functools.partial(wrap_megatron_fsdp, data_parallel_sharding_strategy="optim_grads"),
        {"use_distributed_optimizer": True},
    ),
}
"""Storages of Megatron's trainer, with their wrappers and flags."""


def config_for(**fields: Any) -> EmergingOptimizerConfig:
    given = {"lr": 0.02, "min_lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.0, "adam_beta2": 0.7}
    given |= {"soap_use_kl_shampoo": False, "muon_scale_mode": "spectral", "muon_nesterov": False}
    given |= fields
    return EmergingOptimizerConfig(optimizer="muon", muon_fp32_matmul_prec="highest", **given)


def built(storage: str, wanted: list[Case], **fields: Any) -> tuple[nn.Module, Any]:
    """Return a model and its optimizer, with one override for each case."""
    overrides = {ParamKey(name=f"*m.{n}.weight"): case.override for n, case in enumerate(wanted)}
    if storage in OWN:
        model = cut(Matrices(wanted), OWN[storage], "m.0")
        return model, build_optimizer(model, config_for(**fields), overrides)
    if not parallel_state.model_parallel_is_initialized():
        initialize_megatron()
    wrapper, flags = CHAINS[storage]
    model = wrapper(Matrices(wanted), **(flags if wrapper is wrap_ddp else {}))
    return model, get_megatron_optimizer(config_for(**flags, **fields), [model], overrides)


def set_gradients(storage: str, model: nn.Module, step: int) -> None:
    if storage == "trainer_megatron_fsdp":
        model.module._replace_param_with_distributed_if_needed()
    params = named(model).values() if storage in OWN else model.parameters()
    for param in params:
        if storage in ("replicated", "sharded"):
            param.main_grad.copy_(gradient(step))
        else:
            grad = shard(gradient(step), param)
            is_empty = hasattr(param, "megatron_fsdp_dist_index") and not grad.to_local().numel()
            param.grad = None if is_empty else grad


@eager
def trained(storage: str, wanted: list[Case]) -> list[torch.Tensor]:
    """Return every matrix after some steps; the trainer's storages have Megatron's scheduler."""
    model, optimizer = built(storage, wanted)
    scheduler = None
    if storage in CHAINS:
        scheduler = OptimizerParamScheduler(
            optimizer, 0.0, 0.02, 0.01, 0, STEPS, "linear", 0.1, 0.1, STEPS, "linear"
        )
    for step in range(STEPS):
        optimizer.zero_grad()
        set_gradients(storage, model, step)
        optimizer.step()
        if scheduler is not None:
            scheduler.step(1)
    if storage == "trainer_megatron_fsdp":
        model.module._replace_param_with_distributed_if_needed()
    params = named(model).values() if storage in OWN else model.parameters()
    return [whole(param) for param in params]


def trained_with_tf32(storage: str, wanted: list[Case]) -> list[torch.Tensor]:
    """Do the same after choosing a precision by torch's newer setting, which stays as it is."""
    # an earlier test in this process may have set these by torch's older setting
    for products in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        products.fp32_precision = "none"
    torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]
    try:
        return trained(storage, wanted)
    finally:
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        torch.backends.fp32_precision = "none"  # type: ignore[attr-defined]
        assert torch.backends.cuda.matmul.fp32_precision == "none"


STORAGES = (*OWN, *CHAINS)


def jobs(storage: str) -> tuple[int, dict[str, Any]]:
    """Return how many ranks a storage needs, and how they run."""
    own = storage in ("plain", "fsdp")
    return 1 if storage == "plain" else 2, {"timeout": 300, "cpu": not own}


@pytest.mark.parametrize("storage", mostly_long(STORAGES, "plain", "sharded"))
def test_every_setting_changes_its_parameter_and_no_other(storage):
    wanted = cases(scheduled=storage in CHAINS)
    ranks, how = jobs(storage)
    (weights, *_) = run_ranks(ranks, trained, storage, wanted, **how)
    plain: dict[str, torch.Tensor] = {}
    distances = []
    for case, weight in zip(wanted, weights, strict=True):
        usual = plain.setdefault(case.optimizer, weight)
        distances.append((case, float((weight - usual).norm() / usual.norm())))
    assert not [(case, far) for case, far in distances if case.setting and far < 2e-5]
    assert not [(case, far) for case, far in distances if not case.setting and far > 1e-6]


WRONG: list[tuple[str, str, Any]] = [
    ("muon", "nesterov", "false"),
    ("muon", "nesterov", None),
    ("muon", "momentum", 1.5),
    ("muon", "momentum", "0.9"),
    ("muon", "num_ns_steps", 2.5),
    ("muon", "scale_mode", "spectrum"),
    ("muon", "lr", "0.1"),
    ("muon", "weight_decay", None),
    ("muon", "betas", (0.9, 0.95)),
    ("adam", "betas", 0.9),
    ("adam", "betas", (0.9,)),
    ("adam", "momentum", 0.9),
    ("soap", "nesterov", "false"),
    ("lion", "weight_decay_method", "sometimes"),
]
"""An optimizer, a setting, and a value that it cannot have."""


def refused(storage: str, wanted: list[Case]) -> None:
    for case in wanted:
        with pytest.raises(ConfigurationError) as error:
            built(storage, [case])
        assert repr(case.setting) in str(error.value), case


@pytest.mark.parametrize(
    "storage", mostly_long(["plain", "replicated", "sharded"], "plain", "sharded")
)
def test_other_settings_and_values_are_refused_by_name(storage):
    wanted = [Case(*wrong) for wrong in WRONG]
    scheduled = SCHEDULED if storage in OWN else {}
    for optimizer in ("adam", "muon", "soap"):
        wanted += [Case(optimizer, name, 0.5) for name in sorted(REFUSED | scheduled.keys())]
    run_ranks(1, refused, storage, wanted, **jobs(storage)[1])


def test_one_rate_has_one_value():
    for setting, other in (("lr", "max_lr"), ("weight_decay", "end_wd")):
        with pytest.raises(ConfigurationError, match=f"{setting!r}.*contradicts {other}=0.5"):
            read_overrides({ParamKey(name="*"): {setting: 0.25, other: 0.5}})


@pytest.mark.parametrize("storage", mostly_long(STORAGES, "sharded"))
def test_every_optimizer_steps_after_torchs_newer_precision_setting(storage):
    wanted = [Case(name, None) for name in optimizer_names()]
    ranks, how = jobs(storage)
    (expected, *_), (found, *_) = (
        run_ranks(ranks, by, storage, wanted, **how) for by in (trained, trained_with_tf32)
    )
    torch.testing.assert_close(found, expected)  # a CPU has no tf32


def test_megatron_cores_own_keys_are_passed_on():
    key = ParamKey(name="*.bias")
    assert [*as_megatron_cores({key: {}})] == [key]
