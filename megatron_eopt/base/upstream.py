"""The one place that knows which private names of megatron-core and emerging-optimizers are used.

Neither has a stable interface for optimizers. Names that have moved from release to release stand
here once and are looked for when they are used: what is missing is an error that names it.
"""

import importlib
import logging
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_eopt.base.agreement import is_rank_0

logger = logging.getLogger(__name__)

TESTED = {"megatron-core": "0.19.2", "emerging-optimizers": "0.3.0"}
"""The releases that this package is tested with."""

_PACKAGES = {"megatron-core": "megatron.core", "emerging-optimizers": "emerging_optimizers"}

_NAMES: dict[str, str] = {
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
    "megatron.core.transformer.moe.router": "Router",
    "megatron.core.transformer.experimental_attention_variant.absorbed_mla": "AbsorbedMLA"
    "SelfAttention",
    "megatron.core.transformer.fsdp_dtensor_checkpoint": "get_global_unique_param_name "
    "expert_param_local_key",
    "megatron.core.dist_checkpointing.strategies.torch": "FileSystemReader",
    "megatron.training.training": "get_megatron_optimizer_config get_megatron_ddp_config "
    "wrap_model_chunks_with_ddp train_step training_log",
    "megatron.training.models.dist_utils": "_ddp_wrap",
    "megatron.training.arguments": "parse_args validate_args",
    "megatron.training.checkpointing": "read_metadata load_checkpoint "
    "_load_global_dist_base_checkpoint _get_checkpoint_format get_checkpoint_name "
    "get_load_checkpoint_path_by_args handle_swiglu_in_state_dict _load_base_checkpoint "
    "_maybe_setup_gpt_to_hybrid_load",
    "emerging_optimizers.orthogonalized_optimizers.muon_utils": "_COEFFICIENT_SETS "
    "get_coefficient_iterator newton_schulz newton_schulz_step_tsyrk",
    "emerging_optimizers.triton_kernels": "HAS_TRITON_340",
}

MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
"""The module that defines each of the names that are used."""


class UpstreamError(ImportError):
    """A name that megatron-core or emerging-optimizers lacks."""


def needed(name: str) -> Any:
    """Return the object of one of :data:`MODULE_OF`; an UpstreamError if there is none."""
    try:
        return getattr(owner_of(name), name)
    except (ImportError, AttributeError) as error:
        module = MODULE_OF[name]
        package = "megatron-core" if module.startswith("megatron.") else "emerging-optimizers"
        raise UpstreamError(
            f"{package} {version_of(package)} has no {module}.{name}, which megatron-eopt needs; "
            f"install {package} {TESTED[package]}, which it is tested with"
        ) from error


def found(name: str) -> Any:
    """Return the same if it is there, else None."""
    try:
        return needed(name)
    except UpstreamError:
        return None


def owner_of(name: str) -> ModuleType:
    """Return the module that has one of :data:`MODULE_OF`; an ImportError if there is none."""
    return importlib.import_module(MODULE_OF[name])


def dataset_helpers_to_skip() -> ModuleType | None:
    """Return megatron-core's module whose ``compile_helpers`` cannot work, None if it can.

    The wheel brings the dataset helpers compiled, and no Makefile to compile them with.
    """
    module = importlib.import_module("megatron.core.datasets.utils")
    makefile = Path(module.__file__ or "").with_name("Makefile")
    return None if makefile.exists() else module


def version_of(package: str) -> str:
    """Return the release of a package that is imported, an installed one or a checkout."""
    version = importlib.import_module(_PACKAGES[package]).__version__
    # megatron-core appends the commit of any repository that it happens to lie in
    return str(version).partition("+")[0]


def untested_releases() -> list[str]:
    """Return those of the two packages that are imported in another release than the tested one."""
    versions = {package: version_of(package) for package in TESTED}
    return [f"{name} {version}" for name, version in versions.items() if version != TESTED[name]]


@cache
def warn_of_untested_releases() -> None:
    """Warn once, on one rank, of releases that nobody tested."""
    untested = " and ".join(untested_releases())
    if untested and is_rank_0():
        tested = " and ".join(" ".join(item) for item in TESTED.items())
        logger.warning("megatron-eopt was tested with %s, not with %s", tested, untested)
