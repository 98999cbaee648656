"""Lists the Megatron names to replace and their replacements."""

import importlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

from megatron_eopt import emerging_optimizers, muon
from megatron_eopt.arguments import config_from_args
from megatron_eopt.checkpoint.trainer import Rebindings, trainer_rebindings, wrapped
from megatron_eopt.megatron_core.upstream import (
    dataset_helpers_to_skip,
    find_upstream,
    owner_of,
    require_upstream,
)
from megatron_eopt.megatron_lm import trainer
from megatron_eopt.megatron_lm.log import TrainingLog
from megatron_eopt.qk_clip import clip_qk
from megatron_eopt.wrappers.factory import get_megatron_optimizer
from megatron_eopt.wrappers.layer_wise import LayerWiseDistributedOptimizer

logger = logging.getLogger(__name__)

NEEDED: dict[str, Any] = {
    "get_megatron_optimizer": get_megatron_optimizer,
    "LayerWiseDistributedOptimizer": LayerWiseDistributedOptimizer,
    "clip_qk": clip_qk,
    "get_megatron_optimizer_config": config_from_args,
}
"""Replacements by name; each is needed, or Megatron would build its own optimizers."""

PUBLISHED: dict[str, dict[str, Any]] = {
    "megatron.core.optimizer.emerging_optimizers": {
        name: getattr(emerging_optimizers, name) for name in emerging_optimizers.__all__
    },
    "megatron.core.optimizer.muon": {
        "get_megatron_muon_optimizer": muon.get_megatron_muon_optimizer
    },
}
"""Replacements by module of names that scripts may import; missing ones are skipped."""

WRAPPED: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "parse_args": trainer.with_our_flags,
    "validate_args": trainer.validating_known_flags,
    "get_megatron_ddp_config": trainer.sharding_ddp_config,
    "setup_model_and_optimizer": trainer.requiring_a_rate,
}
"""Wrappers around Megatron functions, by name."""

_WRAPPING = ("wrap_model_chunks_with_ddp", "_ddp_wrap")
"""Functions that may use the layer-wise parameter layout: the first up to megatron-core 0.19, the
second from 0.20 on."""


def rebindings() -> Rebindings:
    """Return everything to replace; raise ImportError if Megatron lacks a needed name."""
    result = _published()
    for name, replacement in NEEDED.items():
        # raises an error that names the release, where ``vars(owner)[name]`` would not
        require_upstream(name)
        result.append((owner_of(name), name, replacement))
    layouts = dict.fromkeys(filter(_lays_out, _WRAPPING), trainer.with_standard_layout)
    log = TrainingLog().wrappers
    result += [*wrapped({**WRAPPED, **layouts, **log}), *trainer_rebindings()]
    # the wheel cannot build its dataset helpers, and comes with compiled ones
    if (helpers := dataset_helpers_to_skip()) is not None:
        result.append((helpers, "compile_helpers", lambda: None))
    return result


def _lays_out(name: str) -> bool:
    function = find_upstream(name)
    wanted = "use_layer_wise_distributed_optimizer"
    return function is not None and wanted in inspect.signature(function).parameters


def _published() -> Rebindings:
    result: Rebindings = []
    absent = []
    for path, names in PUBLISHED.items():
        try:
            module: Any = importlib.import_module(path)
        except ImportError:
            module = None
        for name, replacement in names.items():
            if hasattr(module, name):
                result.append((module, name, replacement))
            else:
                absent.append(f"{path}.{name}")
    if absent:
        logger.info("this megatron-core has no %s, so they are not replaced", ", ".join(absent))
    return result
