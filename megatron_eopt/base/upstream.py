"""The one place that knows what of megatron-core and emerging-optimizers may change.

Neither has a stable interface for optimizers, so private names are used, and names that have moved
or changed from release to release. Each stands here once, with what is needed of it, and is looked
for when it is used: what is missing is an error that names it. No release number decides anything.
"""

import importlib
import inspect
import logging
import pkgutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_eopt.base.agreement import is_rank_0
from megatron_eopt.base.errors import ConfigurationError

logger = logging.getLogger(__name__)

TESTED = {"megatron-core": "0.19.2", "emerging-optimizers": "0.3.0"}
"""The releases that this package is tested with."""

_MODULES = {"megatron-core": "megatron.core", "emerging-optimizers": "emerging_optimizers"}


class UpstreamError(ImportError):
    """A name, a parameter or an attribute that megatron-core or emerging-optimizers lacks."""


@dataclass(frozen=True)
class Need:
    """What is needed of one name of another package; names below have spaces between them."""

    purpose: str  # what does not work without it
    takes: str = ""  # parameters that it is called with by name, or whose values are read
    has: str = ""  # attributes of a class that are called or overridden
    reads: str = ""  # attributes that an instance is given and that the class looks at
    sets: str = ""  # attributes that instances have
    module: str = ""  # the module that defines it


_LAYOUT = Need(
    "one buffer without padding (install)", "ddp_config use_layer_wise_distributed_optimizer"
)

_BY_MODULE: dict[str, dict[str, Need]] = {
    "megatron.core.optimizer": {
        "get_megatron_optimizer": Need("building optimizers (install)"),
        "_get_param_groups": Need("settings from a function that a caller put in its place"),
    },
    "megatron.core.optimizer.optimizer": {
        "ChainedOptimizer": Need("chains of optimizers", has="_compute_grad_norms_by_group"),
        "GRAD_NORM_GROUP_ATTR": Need("gradients with a norm of their own"),
        "param_group_identifier_keys": Need("matching the parameter groups of checkpoints"),
    },
    "megatron.core.optimizer.distrib_optimizer": {
        "DistributedOptimizer": Need(
            "fragments of Megatron's buffers (use_distributed_optimizer)",
            takes="init_state_fn model_chunks per_model_buffers data_parallel_group "
            "data_parallel_group_gloo data_parallel_group_idx distributed_optimizer_instance_id",
            has="compute_full_param_layout _compute_per_buffer_param_layout step_with_ready_grads "
            "_copy_main_params_to_model_params _copy_model_grads_to_main_grads "
            "_get_main_param_and_optimizer_states _set_main_param_and_optimizer_states "
            "_get_model_param_range_map get_parameter_state_dp_reshardable",
            reads="_defer_param_sync",
            sets="buffers gbuf_ranges model_param_gbuf_map model_param_group_index_map "
            "model_float16_groups model_fp32_groups shard_float16_groups shard_fp32_groups "
            "shard_fp32_from_float16_groups",
        ),
    },
    "megatron.core.optimizer.grad_scaler": {
        "DynamicGradScaler": Need(
            "a loss scale that follows overflows",
            "initial_scale min_scale growth_factor backoff_factor growth_interval hysteresis",
        ),
        "ConstantGradScaler": Need("a constant loss scale"),
    },
    "megatron.core.optimizer.layer_wise_optimizer": {
        "LayerWiseDistributedOptimizer": Need("layer-wise storage (install)"),
    },
    "megatron.core.optimizer.emerging_optimizers": {
        "TensorParallelAdaptiveMuon": Need("the order of its arguments", "tp_mode"),
        "EmergingOptimizerEntry": Need(
            "entries among ours",
            "optimizer_cls init_state_fn config_to_kwargs default_param_overrides",
        ),
        "_is_nonlinear_or_embedding": Need("entries among ours"),
    },
    "megatron.core.optimizer.qk_clip": {"clip_qk": Need("QK-clip (install)")},
    "megatron.core.distributed.fsdp.src.megatron_fsdp": {
        "MegatronFSDP": Need("models that Megatron-FSDP manages"),
    },
    "megatron.core.distributed.fsdp.src.megatron_fsdp.mixed_precision": {
        "is_float8tensor": Need("telling weights of 8 bits under Megatron-FSDP"),
    },
    "megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor": {
        "preprocess_state_dict_for_uneven_dtensor": Need("saving state under Megatron-FSDP"),
    },
    "megatron.core.models.mimo.model.base": {"MimoModel": Need("telling MIMO models")},
    "megatron.core.tensor_parallel": {
        "VocabParallelEmbedding": Need("telling embedding tables"),
    },
    "megatron.core.transformer.moe.router": {"Router": Need("telling routers")},
    "megatron.core.transformer.experimental_attention_variant.absorbed_mla": {
        "AbsorbedMLASelfAttention": Need("splitting absorbed latent attention"),
    },
    "megatron.core.transformer.fsdp_dtensor_checkpoint": {
        "get_global_unique_param_name": Need("names of parameters in messages"),
        "expert_param_local_key": Need("checkpoints of Megatron-FSDP"),
    },
    "megatron.core.dist_checkpointing.strategies.torch": {
        "FileSystemReader": Need("reading what a checkpoint holds"),
    },
    "megatron.training.training": {
        "get_megatron_optimizer_config": Need("our flags (install)"),
        "get_megatron_ddp_config": Need("layer-wise storage (install)"),
        "wrap_model_chunks_with_ddp": _LAYOUT,
        "train_step": Need("--log-optimizer-stats", "optimizer"),
        "training_log": Need(
            "--log-optimizer-stats and progress bars (install)", "iteration loss_dict"
        ),
    },
    # wires layer-wise storage by itself from 0.20 on
    "megatron.training.models.dist_utils": {"_ddp_wrap": _LAYOUT},
    "megatron.training.arguments": {
        "parse_args": Need("our flags (install)", "extra_args_provider ignore_unknown_args"),
        "validate_args": Need("torch FSDP2, QK-clip (install)", "args defaults"),
    },
    "megatron.training.checkpointing": {
        "read_metadata": Need("loading the iteration that --ckpt-step names (install)"),
        "load_checkpoint": Need(
            "loading (install)",
            "ddp_model optimizer opt_param_scheduler skip_load_to_model_and_opt",
        ),
        "_load_global_dist_base_checkpoint": Need(
            "matching a checkpoint with what is asked for (install)",
            "load_dir args rank0 sharded_state_dict iteration release",
        ),
        "_get_checkpoint_format": Need(
            "loading by a checkpoint's own format (install)", "checkpoint_name args"
        ),
        "get_checkpoint_name": Need("finding a checkpoint (install)", "return_base_dir"),
        "get_load_checkpoint_path_by_args": Need("checkpoints of Megatron-FSDP", "args"),
        "handle_swiglu_in_state_dict": Need("checkpoints of Megatron-FSDP (install)", "model"),
        "_load_base_checkpoint": Need("checkpoints of Megatron-FSDP (install)"),
    },
    "emerging_optimizers.orthogonalized_optimizers.muon_utils": {
        "_COEFFICIENT_SETS": Need("the numbers of coefficient sets"),
        "get_coefficient_iterator": Need("schedules of coefficient sets", "mode"),
        "newton_schulz": Need(
            "emerging-optimizers' iteration, and its smallest norm",
            "steps coefficient_type custom_coefficient_sets eps transpose",
        ),
        "newton_schulz_step_tsyrk": Need("muon_backend='syrk'"),
    },
    "emerging_optimizers.triton_kernels": {"HAS_TRITON_340": Need("muon_backend='syrk'")},
}

NEEDS = {
    name: replace(need, module=module)
    for module, needs in _BY_MODULE.items()
    for name, need in needs.items()
}
"""What is needed, by name."""


def needed(name: str) -> Any:
    """Return one of :data:`NEEDS`, having looked whether it is as it must be.

    Raises:
        UpstreamError: If it is missing, or lacks a parameter or an attribute.
    """
    need = NEEDS[name]
    try:
        item = getattr(owner_of(name), name)
    except (ImportError, AttributeError) as error:
        raise _lacking(name, f"{need.module}.{name}") from error
    _check(name, item, need.has)
    if lacking := need.takes and set(need.takes.split()) - parameters_of(item).keys():
        raise _lacking(name, f"{', '.join(sorted(lacking))} among the parameters of {name}")
    if unread := [attribute for attribute in need.reads.split() if not _mentions(item, attribute)]:
        raise _lacking(name, f"use for {', '.join(unread)} in {name}")
    return item


def found(name: str) -> Any:
    """Return the same if it is there as it must be, else None."""
    try:
        return needed(name)
    except UpstreamError:
        return None


def is_there(name: str) -> bool:
    """Return whether there is an object of this name, whatever it takes and has."""
    try:
        return hasattr(owner_of(name), name)
    except ImportError:
        return False


def owner_of(name: str) -> ModuleType:
    """Return the module that has one of :data:`NEEDS`; an ImportError if there is none."""
    return importlib.import_module(NEEDS[name].module)


def check_instance(name: str, instance: object) -> None:
    """Raise an UpstreamError unless an instance of a class of :data:`NEEDS` is as it must be."""
    _check(name, instance, NEEDS[name].sets)


def parameters_of(function: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function, or of a class's constructor, by name."""
    return dict(inspect.signature(function).parameters)


def default_of(name: str, parameter: str) -> Any:
    """Return the value that a parameter has where nobody gives one."""
    return parameters_of(needed(name))[parameter].default


def _check(name: str, item: object, attributes: str) -> None:
    if lacking := [attribute for attribute in attributes.split() if not hasattr(item, attribute)]:
        raise _lacking(name, f"{', '.join(lacking)} of {name}")


def _mentions(cls: type, attribute: str) -> bool:
    codes = (getattr(inspect.unwrap(item), "__code__", None) for item in vars(cls).values())
    return any(attribute in (*code.co_names, *code.co_consts) for code in codes if code)


def _lacking(name: str, what: str) -> UpstreamError:
    need = NEEDS[name]
    package = "megatron-core" if need.module.startswith("megatron.") else "emerging-optimizers"
    return UpstreamError(
        f"{package} {version_of(package)} has no {what}, which megatron-eopt needs for "
        f"{need.purpose}; install {package} {TESTED[package]}, which it is tested with, or do "
        "without that"
    )


def register_all_optimizers() -> None:
    """Import the packages inside emerging-optimizers, which then register their optimizers."""
    package = importlib.import_module("emerging_optimizers")
    for module in pkgutil.iter_modules(package.__path__, "emerging_optimizers."):
        if not module.ispkg:
            continue
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            logger.warning("%s cannot be imported, nor its optimizers used: %s", module.name, error)


def dataset_helpers_to_skip() -> ModuleType | None:
    """Return megatron-core's module whose ``compile_helpers`` cannot work, None if it can.

    The wheel brings the dataset helpers compiled, and no Makefile to compile them with.
    """
    module = importlib.import_module("megatron.core.datasets.utils")
    makefile = Path(module.__file__ or "").with_name("Makefile")
    return None if makefile.exists() else module


def version_of(package: str) -> str:
    """Return the release of a package that is imported, an installed one or a checkout."""
    version = importlib.import_module(_MODULES[package]).__version__
    # megatron-core appends the commit of any repository that it happens to lie in
    return str(version).partition("+")[0]


def untested_releases() -> list[str]:
    """Return those of the two packages that are imported in another release than the tested one."""
    versions = {package: version_of(package) for package in TESTED}
    return [f"{name} {version}" for name, version in versions.items() if version != TESTED[name]]


_warned: set[str] = set()


def check_releases(*, strict: bool) -> None:
    """Warn once, on one rank, of releases that nobody tested; refuse them if ``strict``.

    Raises:
        ConfigurationError: If ``strict`` and there is one.
    """
    if not (untested := " and ".join(untested_releases())):
        return
    tested = " and ".join(" ".join(item) for item in TESTED.items())
    if strict:
        rule = f"{untested} is not what megatron-eopt was tested with"
        raise ConfigurationError(
            "strict_upstream", True, rule, f"Install {tested}, or leave it off"
        )
    if untested not in _warned and is_rank_0():
        logger.warning(
            "megatron-eopt was tested with %s, not with %s; what it needs of these is looked for, "
            "and an error if it is missing",
            tested,
            untested,
        )
    _warned.add(untested)
