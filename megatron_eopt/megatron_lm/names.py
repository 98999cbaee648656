"""Which of Megatron's names are replaced, and by what."""

import importlib
from collections.abc import Callable
from typing import Any

from megatron_eopt import emerging_optimizers, muon
from megatron_eopt.base.versions import dataset_helpers_to_skip
from megatron_eopt.build.factory import get_megatron_optimizer
from megatron_eopt.build.layer_wise import LayerWiseDistributedOptimizer
from megatron_eopt.checkpoint.trainer import trainer_rebindings, wrapped
from megatron_eopt.megatron_lm.processes import without_the_script
from megatron_eopt.megatron_lm.rebinding import Rebinding
from megatron_eopt.megatron_lm.trainer import (
    checking_what_it_knows,
    config_of_optimizer,
    in_the_usual_layout,
    sharding_ddp_config,
    with_our_flags,
)
from megatron_eopt.qk_clip import clip_qk

EMERGING_OPTIMIZERS = (
    "EmergingOptimizerEntry",
    "TensorParallelAdaptiveMuon",
    "TensorParallelMuon",
    "_EMERGING_OPTIMIZERS",
    "_adaptive_muon_config_to_kwargs",
    "_create_emerging_optimizer",
    "_default_adam_based_eopt_config_to_kwargs",
    "_default_param_overrides_factory",
    "_eopt_init_state_fn",
    "_get_qkv_split_shapes",
    "_is_nonlinear_or_embedding",
    "_kwargs_from_config",
    "_muon_config_to_kwargs",
    "get_supported_coefficient_types",
    "validate_coefficient_type",
)
"""Names of Megatron's module ``emerging_optimizers`` that are ours in our module of that name."""

PUBLISHED: dict[str, dict[str, Any]] = {
    "megatron.core.optimizer": {"get_megatron_optimizer": get_megatron_optimizer},
    "megatron.core.optimizer.emerging_optimizers": {
        name: getattr(emerging_optimizers, name) for name in EMERGING_OPTIMIZERS
    },
    "megatron.core.optimizer.layer_wise_optimizer": {
        "LayerWiseDistributedOptimizer": LayerWiseDistributedOptimizer
    },
    "megatron.core.optimizer.qk_clip": {"clip_qk": clip_qk},
    "megatron.core.optimizer.muon": {
        "get_megatron_muon_optimizer": muon.get_megatron_muon_optimizer
    },
    "megatron.training.training": {"get_megatron_optimizer_config": config_of_optimizer},
}
"""Objects that take the place of Megatron's, by the module that defines them."""

WRAPPED: dict[str, dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    "megatron.core.dist_checkpointing.strategies.filesystem_async": {
        "get_write_results_queue": without_the_script
    },
    "megatron.training.arguments": {
        "parse_args": with_our_flags,
        "validate_args": checking_what_it_knows,
    },
    "megatron.training.training": {
        "get_megatron_ddp_config": sharding_ddp_config,
        "wrap_model_chunks_with_ddp": in_the_usual_layout,
    },
}
"""Functions of Megatron that still run, inside ours."""


def rebindings() -> list[Rebinding]:
    """Return everything to replace; an ImportError if Megatron lacks a module or a function."""
    found = [
        Rebinding(importlib.import_module(module), name, replacement)
        for module, names in PUBLISHED.items()
        for name, replacement in names.items()
    ]
    wrappers = [item for module, names in WRAPPED.items() for item in wrapped(names, module)]
    found += [Rebinding(*names) for names in (*wrappers, *trainer_rebindings())]
    if (helpers := dataset_helpers_to_skip()) is not None:
        found.append(Rebinding(helpers, "compile_helpers", lambda: None))
    return found
