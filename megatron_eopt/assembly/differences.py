"""Where we differ from megatron-core although the configuration is its own: said once."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.utils import log_single_rank

from megatron_eopt.assembly.meaning import Meaning
from megatron_eopt.matrices import Split
from megatron_eopt.optimizers.config_kwargs import constructor_arguments
from megatron_eopt.optimizers.registry import entry_of
from megatron_eopt.routing.routes import Route

logger = logging.getLogger(__name__)

_said: set[str] = set()


def differences(
    config: Any,
    meaning: Meaning,
    routes: Sequence[Route],
    splits: Mapping[torch.nn.Parameter, Split],
) -> list[str]:
    """Return what is different for this configuration and model, as sentences.

    Args:
        config: The configuration.
        meaning: What it means.
        routes: Where this rank's parameters go.
        splits: How its fused weights are split.
    """
    if meaning.is_standard or meaning.recommended:
        return []
    found = []
    tables = [
        route.parameter.name
        for route in routes
        if route.parameter.is_embedding
        and len(route.parameter.shape) == 2
        and not getattr(route.parameter.param, "is_embedding_or_output_parameter", False)
        and route.optimizer != meaning.optimizer
    ]
    if tables:
        found.append(
            f"{', '.join(tables)}: an embedding table goes to {meaning.scalar}; megatron-core "
            f"gives it to {meaning.optimizer}"
        )
    uneven = [
        route.parameter.name
        for route in routes
        if _is_split_here_alone(route.parameter.param, splits)
    ]
    if uneven:
        found.append(
            f"{', '.join(uneven)}: Q, K and V are split although tensor parallelism cuts a query "
            "group; megatron-core orthogonalizes them as one matrix"
        )
    if not config.decoupled_weight_decay:
        found.append(
            "decoupled_weight_decay=False holds for every optimizer; megatron-core ignores it for "
            f"{meaning.optimizer}"
        )
    if meaning.optimizer == "lion":
        found.append("lion takes lion_beta1 and lion_beta2; megatron-core gives it Adam's betas")
    if config.loss_scale and config.bf16:
        found.append("loss_scale holds for every optimizer; megatron-core unscales Adam's only")
    return found


def _is_split_here_alone(param: Any, splits: Mapping[torch.nn.Parameter, Split]) -> bool:
    split = splits.get(param)
    if split is None or split.kind != "qkv" or hasattr(param, "eopt_split"):
        return False
    return not getattr(param, "is_qkv", False)


def log_differences(sentences: Sequence[str]) -> None:
    """Log each sentence, on one rank, unless it was logged before."""
    for sentence in sentences:
        if sentence not in _said:
            _said.add(sentence)
            log_single_rank(logger, logging.INFO, f"unlike megatron-core: {sentence}")


def warn_if_too_long(config: Any, meaning: Meaning) -> None:
    """Warn once where AdaMuon's steps will be far longer than any paper means."""
    scale = getattr(config, "muon_scale_mode", None)
    if (
        meaning.optimizer == "adaptive_muon"
        and getattr(config, "adaptive_muon_moment2_method", None) == "adamuon"
        and scale in ("spectral", "adamw_rms")
    ):
        _warn_once(
            f"muon_scale_mode={scale!r} with adaptive_muon_moment2_method='adamuon': AdaMuon "
            "brings entries to about 1 by itself, so this scale makes them as large as the root "
            "of the matrix's larger side; 'shape_scaling' with muon_extra_scale_factor=0.2 does not"
        )


def warn_if_inexact(config: Any, meaning: Meaning, tensor_parallel_size: int) -> None:
    """Warn once where the update will depend on how tensor parallelism cuts matrices."""
    if tensor_parallel_size == 1 or meaning.is_standard:
        return
    entry = entry_of(meaning.optimizer)
    if "tp_mode" in constructor_arguments(entry.optimizer_cls):
        if getattr(config, "muon_tp_mode", None) == "blockwise":
            _warn_once(
                "muon_tp_mode='blockwise' orthogonalizes each tensor-parallel rank's piece by "
                "itself, so the result depends on the number of ranks; 'duplicated' and 'auto' are "
                "exact"
            )
    elif meaning.storage == "replicated" and entry.state_layout != "element_wise":
        _warn_once(
            f"optimizer={meaning.optimizer!r} updates each tensor-parallel rank's piece of a "
            "matrix by itself, so the result depends on the number of ranks; with "
            "use_distributed_optimizer=True it gets whole matrices"
        )


def _warn_once(sentence: str) -> None:
    if sentence not in _said:
        _said.add(sentence)
        log_single_rank(logger, logging.WARNING, sentence)
