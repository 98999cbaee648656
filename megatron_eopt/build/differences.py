"""Where we differ from megatron-core although the configuration is its own: said once."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.utils import log_single_rank

from megatron_eopt.routing.model import Routing
from megatron_eopt.settings.settings import Settings

logger = logging.getLogger(__name__)

_said: set[str] = set()


def differences(settings: Settings, routing: Routing) -> list[str]:
    """Return what is different for this configuration and model, as sentences."""
    if settings.is_standard or settings.recommended:
        return []
    found = []
    tables = [
        route.parameter.name
        for route in routing.routes
        if route.parameter.is_embedding
        and len(route.parameter.shape) == 2
        and not getattr(route.parameter.param, "is_embedding_or_output_parameter", False)
        and route.optimizer != settings.optimizer
    ]
    if tables:
        found.append(
            f"{', '.join(tables)}: an embedding table goes to {settings.scalar}; megatron-core "
            f"gives it to {settings.optimizer}"
        )
    uneven = [
        route.parameter.name
        for route in routing.routes
        if _is_split_here_alone(route.parameter.param, routing)
    ]
    if uneven:
        found.append(
            f"{', '.join(uneven)}: Q, K and V are split although tensor parallelism cuts a query "
            "group; megatron-core orthogonalizes them as one matrix"
        )
    if not settings.decoupled_weight_decay:
        found.append(
            "decoupled_weight_decay=False holds for every optimizer; megatron-core ignores it for "
            f"{settings.optimizer}"
        )
    if settings.optimizer == "lion":
        found.append("lion takes lion_beta1 and lion_beta2; megatron-core gives it Adam's betas")
    if settings.half == "bf16" and settings.loss_scale is not None:
        found.append("loss_scale holds for every optimizer; megatron-core unscales Adam's only")
    return found


def _is_split_here_alone(param: Any, routing: Routing) -> bool:
    split = routing.splits.get(param)
    if split is None or split.kind != "qkv" or hasattr(param, "eopt_split"):
        return False
    return not getattr(param, "is_qkv", False)


def log_differences(sentences: Sequence[str]) -> None:
    """Log each sentence, on one rank, unless it was logged before."""
    for sentence in sentences:
        if sentence not in _said:
            _said.add(sentence)
            log_single_rank(logger, logging.INFO, f"unlike megatron-core: {sentence}")


def warn_if_too_long(arguments: Mapping[str, Any]) -> None:
    """Warn once where AdaMuon's steps will be far longer than any paper means.

    Args:
        arguments: Of the constructor of the main optimizer.
    """
    scale = arguments.get("scale_mode")
    if arguments.get("moment2_method") == "adamuon" and scale in ("spectral", "adamw_rms"):
        _warn_once(
            f"muon_scale_mode={scale!r} with adaptive_muon_moment2_method='adamuon': AdaMuon "
            "brings entries to about 1 by itself, so this scale makes them as large as the root "
            "of the matrix's larger side; 'shape_scaling' with muon_extra_scale_factor=0.2 does not"
        )


def warn_if_inexact(
    settings: Settings, arguments: Mapping[str, Any], tensor_parallel_size: int
) -> None:
    """Warn once where the update will depend on how tensor parallelism cuts matrices."""
    if tensor_parallel_size == 1 or settings.is_standard:
        return
    if "tp_mode" in arguments:
        if arguments["tp_mode"] == "blockwise":
            _warn_once(
                "muon_tp_mode='blockwise' orthogonalizes each tensor-parallel rank's piece by "
                "itself, so the result depends on the number of ranks; 'duplicated' and 'auto' are "
                "exact"
            )
    elif settings.storage == "replicated" and settings.state_layout != "element_wise":
        _warn_once(
            f"optimizer={settings.optimizer!r} updates each tensor-parallel rank's piece of a "
            "matrix by itself, so the result depends on the number of ranks; with "
            "use_distributed_optimizer=True it gets whole matrices"
        )


def _warn_once(sentence: str) -> None:
    if sentence not in _said:
        _said.add(sentence)
        log_single_rank(logger, logging.WARNING, sentence)
