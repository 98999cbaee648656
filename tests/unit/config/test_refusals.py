"""Each setting that a mode cannot serve raises an error that names it.

The cases are written out, not read from the tables of the package: an entry that gets lost is seen.
"""

import argparse
import itertools
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig, ParamKey

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig, get_megatron_optimizer
from megatron_eopt.config.settings import resolve
from megatron_eopt.cpu import check_supported
from megatron_eopt.megatron_fsdp import build_optimizer
from megatron_eopt.routing.routes import read_overrides
from megatron_eopt.wrappers.config_file import read_optimizer_file
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import tiny_gpt, wrap_ddp
from tests.unit.fsdp2.models import Model
from tests.unit.storage.foreign import FIELDS, STORAGES, Foreign, wrapped

OWN_LOOP = "own loop"
PLACES = (*STORAGES, OWN_LOOP)


@dataclass(frozen=True)
class Mode:
    """What a model is built with, besides Muon's defaults, and what the error begins with."""

    storage: str
    argument: str
    config: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)  # settings of all matrices
    named: str = ""  # another setting that the error names


def flag(storage: str, name: str, value: Any = True, **fields: Any) -> Mode:
    """Return the case of a field of the optimizer's configuration that is refused by itself."""
    return Mode(storage, f"{name}={value!r}", {name: value}, **fields)


LOOKS_AHEAD = {"muon_overlap_dp_comm": True}
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
CLIPS = {"qk_clip": True}


def overlap(needs: str, storage: str = "sharded", **fields: Any) -> Mode:
    """Return a case in which Muon's step overlaps, and a setting that it does not allow."""
    fields = {**fields, "config": LOOKS_AHEAD | fields.get("config", {})}
    fields["ddp"] = OVERLAPS | fields.get("ddp", {})
    return Mode(storage, "muon_overlap_dp_comm=True", **fields, named=f"needs {needs}")


def clips(name: str, where: str = "config", storage: str = "sharded", **fields: Any) -> Mode:
    """Return a case of QK-clip with a mode that is on in a configuration."""
    given = {where: {name: True} | fields.get(where, {})}
    return Mode(storage, "qk_clip=True", **fields | given, model=CLIPS, named=f"but {name} ")


FROM_TRANSFORMER_ENGINE = "use_precision_aware_optimizer"
GATHERS_EARLY = "overlap_param_gather_with_optimizer_step"
REUSES = "reuse_grad_buf_for_mxfp8_param_ag"
CAPTURES = "optimizer_cuda_graph"
SHARDS = "use_distributed_optimizer"

MODES = [
    # optimizers of matrices in shares of Megatron's buffers
    *(flag("sharded", name) for name in (FROM_TRANSFORMER_ENGINE, REUSES, GATHERS_EARLY, CAPTURES)),
    flag("replicated", CAPTURES),
    *(
        Mode(storage, f"{CAPTURES}=True", {"optimizer": "sgd", CAPTURES: True})
        for storage in ("sharded", "replicated")
    ),
    Mode("sharded", f"DistributedDataParallelConfig.{REUSES}=True", ddp={REUSES: True}),
    # a step that begins before the gradient norm is known
    overlap("fp16=False", config={"fp16": True}),
    overlap("loss_scale=None", config={"loss_scale": 8.0}),
    overlap("optimizer_cpu_offload=False", config={"optimizer_cpu_offload": True}),
    *(
        overlap("muon_momentum_dtype='fp32'", config={"muon_momentum_dtype": kind})
        for kind in ("bf16", "fp8", "int8")
    ),
    *(
        overlap("momentum_dtype='fp32'", overrides={"momentum_dtype": kind})
        for kind in ("bf16", "fp8", "int8")
    ),
    overlap("overlap_grad_reduce=True", ddp={"overlap_grad_reduce": False}),
    overlap("overlap_param_gather=True", ddp={"overlap_param_gather": False}),
    overlap("fp8_param_gather=False", ddp={"fp8_param_gather": True}),
    overlap("fp4_param_gather=False", ddp={"fp4_param_gather": True}),
    overlap("calculate_per_token_loss=False", model={"calculate_per_token_loss": True}),
    overlap("get_megatron_optimizer, optimizer='muon'", storage="replicated"),
    *(
        overlap("get_megatron_optimizer, optimizer='muon'", config={"optimizer": name})
        for name in ("adaptive_muon", "soap", "adam")
    ),
    # clipping of query and key weights
    clips("optimizer_cpu_offload", config={"optimizer": "adam"}),
    clips(FROM_TRANSFORMER_ENGINE),
    clips("fp8_param_gather", "ddp"),
    clips("fp4_param_gather", "ddp"),
    clips("use_megatron_fsdp", "ddp", "megatron_fsdp"),
    clips(GATHERS_EARLY),
    clips(GATHERS_EARLY, "ddp"),
    clips("muon_overlap_dp_comm", ddp=OVERLAPS),
    # DTensors
    *(
        flag(storage, name, value)
        for storage in ("fsdp2", "megatron_fsdp", OWN_LOOP)
        for name, value in {
            "fp16": True,
            "loss_scale": 8.0,
            FROM_TRANSFORMER_ENGINE: True,
            CAPTURES: True,
            GATHERS_EARLY: True,
            "muon_skip_grad_clip": True,
            "muon_tp_mode": "blockwise",
        }.items()
    ),
    flag(OWN_LOOP, "grad_norm_skip_threshold", 5.0),
    flag(OWN_LOOP, "grad_norm_skip_threshold", 0.0),
    *(
        Mode("megatron_fsdp", f"DistributedDataParallelConfig.{name}={value!r}", ddp={name: value})
        for name, value in {
            "megatron_fsdp_cuda_graph_mode": True,
            "megatron_fsdp_use_decoupled_grad": True,
            "outer_dp_sharding_strategy": "optim",
        }.items()
    ),
    # what a wrapper does to gradients
    Mode("replicated", f"DistributedDataParallelConfig.{SHARDS}=True", ddp={SHARDS: True}),
    Mode("sharded", f"{SHARDS}=True", config={"optimizer": "adam"}, ddp={SHARDS: False}),
]


def built(mode: Mode, model: Any) -> str:
    """Return the error of a build; empty if it succeeds."""
    fields = {"use_distributed_optimizer": mode.storage in ("sharded", "megatron_fsdp")}
    config = EmergingOptimizerConfig(**FIELDS | fields)
    # set later, as some need a GPU when a configuration is made
    vars(config).update(mode.config)
    overrides = {ParamKey(name="*hidden.weight"): mode.overrides} if mode.overrides else None
    with ExitStack() as briefly:
        for name, values in (("ddp_config", mode.ddp), ("config", mode.model)):
            if values:
                briefly.enter_context(mock.patch.dict(vars(getattr(model, name)), values))
        try:
            if mode.storage == OWN_LOOP:
                build_optimizer(model, config, overrides)
            else:
                get_megatron_optimizer(config, [model], overrides)
        except ConfigurationError as error:
            return str(error)
    return ""


def errors(storage: str, modes: list[Mode]) -> tuple[list[str], str]:
    """Return the error of each mode, and that of the same model without any."""
    model = Model() if storage == OWN_LOOP else wrapped(storage, Foreign())
    return [built(mode, model) for mode in modes], built(Mode(storage, ""), model)


@pytest.mark.parametrize("storage", PLACES)
def test_a_mode_that_a_storage_does_not_serve(storage: str) -> None:
    modes = [mode for mode in MODES if mode.storage == storage]
    assert modes
    ((found, without),) = run_ranks(1, errors, storage, modes, cpu=storage != OWN_LOOP)
    assert not without
    for mode, error in zip(modes, found, strict=True):
        assert error.startswith(f"{mode.argument}: "), mode
        assert mode.named in error, mode


@on_ranks(2)
def test_a_step_that_looks_ahead_serves_one_instance_of_the_distributed_optimizer() -> None:
    initialize_megatron(optimizer_instances=2)
    flags = {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2}
    model = wrap_ddp(Foreign(), **flags, **OVERLAPS)
    error = built(Mode("sharded", "", LOOKS_AHEAD), model)
    assert "muon_overlap_dp_comm=True: needs num_distributed_optimizer_instances=1" in error, error


def values() -> Iterator[tuple[str, str, Any]]:
    """Yield an optimizer, one of its fields, and a value outside the bounds."""
    for name in ("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "muon_lr", "muon_min_lr"):
        yield "muon", name, -1e-9
    for name in ("weight_decay", "clip_grad", "grad_norm_skip_threshold", "loss_scale"):
        yield "muon", name, -1e-9
    for optimizer, name in (
        *(("adam", "adam_beta1"), ("adam", "adam_beta2"), ("sgd", "sgd_momentum")),
        *(("lion", "lion_beta1"), ("lion", "lion_beta2"), ("soap", "soap_shampoo_beta")),
        *(("adaptive_muon", "adaptive_muon_beta2"), ("muon", "muon_momentum")),
    ):
        yield optimizer, name, -1e-9
        yield optimizer, name, 1.0
    yield "adam", "adam_eps", 0.0
    yield "adaptive_muon", "adaptive_muon_eps", 0.0
    yield "muon", "muon_extra_scale_factor", 0.0
    yield "muon", "optimizer_offload_fraction", -1e-9
    yield "muon", "optimizer_offload_fraction", 1.0 + 1e-9
    yield "muon", "matrix_buffer_mb", 1e-9
    yield "muon", "muon_max_ranks_per_matrix", 0
    yield "muon", "muon_num_ns_steps", 0
    for name in ("muon_tp_mode", "muon_scale_mode", "muon_fp32_matmul_prec", "muon_algorithm"):
        yield "muon", name, "other"
    for name in ("muon_momentum_dtype", "muon_scalar_optimizer", "muon_coefficient_type"):
        yield "muon", name, "other"
    yield "muon", "muon_backend", "other"
    yield "adaptive_muon", "adaptive_muon_moment2_method", "other"
    yield "muon", "fp16", True
    yield "muon", "muon_momentum", math.nan
    yield "muon", "muon_extra_scale_factor", math.inf
    yield "muon", "optimizer", "muonn"


@pytest.mark.parametrize(("optimizer", "name", "value"), values())
def test_a_value_out_of_bounds(optimizer: str, name: str, value: Any) -> None:
    config = EmergingOptimizerConfig(optimizer=optimizer, lr=0.1, bf16=name == "fp16")
    resolve(config)
    setattr(config, name, value)
    with pytest.raises(ConfigurationError) as caught:
        resolve(config)
    assert str(caught.value).startswith(f"{name}={value!r}")


def test_steps_may_have_no_largest_norm() -> None:
    for config in (OptimizerConfig(optimizer="adam", lr=0.1), EmergingOptimizerConfig(lr=0.1)):
        config.grad_norm_skip_threshold = math.inf
        assert resolve(config).config.grad_norm_skip_threshold == math.inf


@pytest.mark.parametrize(
    "mode", [FROM_TRANSFORMER_ENGINE, "optimizer_cpu_offload", GATHERS_EARLY, CAPTURES]
)
def test_a_mode_of_adam_that_only_megatron_serves(mode: str) -> None:
    config = OptimizerConfig(optimizer="adam", lr=0.1)
    assert resolve(config).upstream_modes == ()
    setattr(config, mode, True)
    assert resolve(config).upstream_modes == (mode,)


MEGATRONS = ("params", "is_expert_parallel", "default_config", "is_decoupled_lr", "group_id")
NOT_NEGATIVE = ("lr", "max_lr", "min_lr", "lr_mult", "weight_decay", "start_wd", "end_wd")


@pytest.mark.parametrize(
    ("name", "value", "own_loop"),
    [
        *((name, 1.0, False) for name in MEGATRONS),
        *((name, -1e-9, False) for name in (*NOT_NEGATIVE, "wd_mult")),
        *((name, "1", False) for name in (*NOT_NEGATIVE, "wd_mult")),
        *((name, 0.5, True) for name in ("min_lr", "start_wd", "end_wd")),
    ],
)
def test_a_setting_that_an_override_cannot_have(name: str, value: Any, own_loop: bool) -> None:
    with pytest.raises(ConfigurationError, match=f"^config_overrides.*{name}.*={value!r}"):
        read_overrides({ParamKey(name="*"): {name: value}}, own_loop=own_loop)


OF_THE_RUN = {
    **dict.fromkeys(("fp16", "bf16", REUSES, "overlap_param_gather", GATHERS_EARLY), "true"),
    **dict.fromkeys(("log_num_zeros_in_grad", "barrier_with_L1_time"), "true"),
    **dict.fromkeys(("use_layer_wise_distributed_optimizer",), "true"),
    "params_dtype": "bf16",
    "fp8_recipe": "delayed",
    "timers": "null",
    "config_logger_dir": "logs",
}


@pytest.mark.parametrize("name", OF_THE_RUN)
def test_a_setting_that_a_file_cannot_have(tmp_path: Any, name: str) -> None:
    path = tmp_path / "optimizer.yaml"
    key = name.replace("_", "-")
    path.write_text(f"optimizer: muon\n{key}: {OF_THE_RUN[name]}\n")
    with pytest.raises(ConfigurationError, match=f"optimizer.yaml: {key}=.*belongs to the run"):
        read_optimizer_file(path)


NEED_A_GPU = [
    ("distributed_backend", "nccl", "distributed-backend"),
    ("transformer_impl", "transformer_engine", "transformer-impl"),
    ("transformer_impl", "inference_optimized", "transformer-impl"),
    ("attention_backend", "flash", "attention-backend"),
    ("attention_backend", "fused", "attention-backend"),
    ("moe_token_dispatcher_type", "flex", "moe-token-dispatcher-type"),
    ("gradient_accumulation_fusion", True, "gradient_accumulation_fusion"),
    ("no_persist_layer_norm", False, "no-persist-layer-norm"),
    ("fp8", "hybrid", "fp8-format"),
    ("fp4", "e2m1", "fp4-format"),
    ("nccl_ub", True, "use-nccl-ub"),
    ("cuda_graph_impl", "local", "cuda-graph-impl"),
    ("context_parallel_size", 2, "context-parallel-size"),
    *(
        (name, True, name.replace("_", "-"))
        for name in (
            *("enable_cuda_graph", "external_cuda_graph", "optimizer_cuda_graph"),
            *("use_precision_aware_optimizer", "tp_comm_overlap"),
            *("overlap_moe_expert_parallel_comm", "use_sharp", "profile"),
            *("fine_grained_activation_offloading", "record_memory_history"),
        )
    ),
    *(("hybrid_layer_pattern", f"*-{layer}-", "hybrid-layer-pattern") for layer in "MGD"),
]


@pytest.mark.parametrize(("name", "value", "shown"), NEED_A_GPU)
def test_a_flag_that_needs_a_gpu(name: str, value: Any, shown: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^(--)?{shown}='?{value}".replace("*", r"\*")):
        check_supported(argparse.Namespace(**{name: value}))


# off-loading needs its flag; the fraction alone turns nothing on


@pytest.mark.parametrize(("flag", "expected"), [(False, 0.0), (True, 0.5)])
def test_the_flag_decides(flag, expected):
    fields = {"use_distributed_optimizer": True, "optimizer_cpu_offload": flag}
    fields |= {"optimizer": "muon", "lr": 1e-3, "optimizer_offload_fraction": 0.5}
    config = EmergingOptimizerConfig(**fields)
    assert resolve(config).offload_fraction == expected


@on_ranks(3)
def test_megatrons_adam_is_not_off_loaded_without_a_gpu():
    """Its first step would end in a KeyError."""
    initialize_megatron()
    model = wrap_ddp(tiny_gpt(dtype=torch.bfloat16), use_distributed_optimizer=True)
    fields = {"bf16": True, "use_distributed_optimizer": True, "optimizer_cpu_offload": True}
    fields |= {"optimizer": "adam", "lr": 1e-3}
    told = "^optimizer_cpu_offload=True: megatron-core's optimizer that.*needs a GPU"
    for cls, fraction in itertools.product((OptimizerConfig, EmergingOptimizerConfig), (0.5, 1.0)):
        config = cls(optimizer_offload_fraction=fraction, **fields)
        with pytest.raises(ConfigurationError, match=told):
            get_megatron_optimizer(config, [model])
