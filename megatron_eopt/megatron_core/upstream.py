"""Lists the unstable names of megatron-core and emerging-optimizers that this package uses.

They are looked up when used, so that a missing one raises an error that names it.
"""

import importlib
import logging
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_eopt.base.log import warn

logger = logging.getLogger(__name__)

TESTED = {"megatron-core": "0.19.2", "emerging-optimizers": "0.3.0"}
"""The upstream releases that this package is tested with."""

_PACKAGES = {"megatron-core": "megatron.core", "emerging-optimizers": "emerging_optimizers"}

_NAMES: dict[str, str] = {
    "megatron.core.parallel_state": "get_gtp_weight_remat_world_size "
    "get_expert_gtp_weight_remat_world_size",
    "megatron.core.optimizer": "get_megatron_optimizer _get_param_groups",
    "megatron.core.optimizer.optimizer": "ChainedOptimizer GRAD_NORM_GROUP_ATTR "
    "SEPARATE_GRAD_NORM_GROUPS param_group_identifier_keys",
    "megatron.core.optimizer.grad_scaler": "DynamicGradScaler ConstantGradScaler",
    "megatron.core.optimizer.layer_wise_optimizer": "LayerWiseDistributedOptimizer",
    "megatron.core.optimizer.emerging_optimizers": "_is_nonlinear_or_embedding",
    "megatron.core.optimizer.qk_clip": "clip_qk",
    "megatron.core.distributed.fsdp.src.megatron_fsdp": "MegatronFSDP",
    "megatron.core.distributed.fsdp.src.megatron_fsdp.mixed_precision": "is_float8tensor",
    "megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor": "preprocess_state_dict_for_"
    "uneven_dtensor",
    "megatron.core.models.mimo.model.base": "MimoModel",
    "megatron.core.tensor_parallel": "VocabParallelEmbedding",
    "megatron.core.tokenizers.utils.build_tokenizer": "vocab_size_with_padding",
    "megatron.core.transformer.experimental_attention_variant.absorbed_mla": "AbsorbedMLA"
    "SelfAttention",
    "megatron.core.transformer.fsdp_dtensor_checkpoint": "get_global_unique_param_name "
    "expert_param_local_key",
    "megatron.core.dist_checkpointing.strategies.torch": "FileSystemReader",
    "megatron.training.training": "get_megatron_optimizer_config get_megatron_ddp_config "
    "wrap_model_chunks_with_ddp setup_model_and_optimizer train_step training_log",
    "megatron.training.models.dist_utils": "_ddp_wrap",
    "megatron.training.arguments": "parse_args validate_args",
    "megatron.training.async_utils": "schedule_async_save maybe_finalize_async_save",
    "megatron.training.checkpointing": "read_metadata load_checkpoint save_checkpoint "
    "_load_global_dist_base_checkpoint _get_checkpoint_format get_checkpoint_name "
    "get_checkpoint_tracker_filename "
    "get_load_checkpoint_path_by_args handle_swiglu_in_state_dict _load_base_checkpoint "
    "_maybe_setup_gpt_to_hybrid_load",
    "megatron.training.wandb_utils": "on_save_checkpoint_success",
    "emerging_optimizers.orthogonalized_optimizers.muon_utils": "_COEFFICIENT_SETS "
    "get_coefficient_iterator newton_schulz",
}

MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
"""The module that defines each name."""


class UpstreamError(ImportError):
    """The installed megatron-core or emerging-optimizers lacks a name that is needed."""


def require_upstream(name: str) -> Any:
    """Return the object with a name of :data:`MODULE_OF`; raise UpstreamError if it is missing."""
    try:
        return getattr(owner_of(name), name)
    except (ImportError, AttributeError) as error:
        module = MODULE_OF[name]
        package = "megatron-core" if module.startswith("megatron.") else "emerging-optimizers"
        raise UpstreamError(
            f"{package} {version_of(package)} has no {module}.{name}, which megatron-eopt needs; "
            f"install {package} {TESTED[package]}, the tested release"
        ) from error


def find_upstream(name: str) -> Any:
    """Return the object with a name of :data:`MODULE_OF`, or None if it is missing."""
    try:
        return require_upstream(name)
    except UpstreamError:
        return None


def owner_of(name: str) -> ModuleType:
    """Return the module of a name of :data:`MODULE_OF`; raise ImportError if it is missing."""
    return importlib.import_module(MODULE_OF[name])


def dataset_helpers_to_skip() -> ModuleType | None:
    """Return the module whose ``compile_helpers`` to skip; None if the helpers can be built.

    The megatron-core wheel has compiled dataset helpers, but no Makefile to build them again.
    """
    module = importlib.import_module("megatron.core.datasets.utils")
    # `compile_helpers` runs make in this folder, and ends the process if that fails
    makefile = Path(module.__file__ or "").with_name("Makefile")
    return None if makefile.exists() else module


def version_of(package: str) -> str:
    """Return the version of the imported package, whether installed or a source checkout."""
    version = importlib.import_module(_PACKAGES[package]).__version__
    # megatron-core appends the commit of whatever repository contains it
    return str(version).partition("+")[0]


def untested_releases() -> list[str]:
    """Return name and version of each upstream package whose release is not the tested one."""
    versions = {package: version_of(package) for package in TESTED}
    return [f"{name} {version}" for name, version in versions.items() if version != TESTED[name]]


@cache
def warn_of_untested_releases() -> None:
    """Warn once, on rank 0, if an upstream package is not the tested release."""
    untested = " and ".join(untested_releases())
    if untested:
        tested = " and ".join(" ".join(item) for item in TESTED.items())
        warn(logger, "megatron-eopt was tested with %s, not with %s", tested, untested)
