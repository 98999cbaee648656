"""Where we differ from megatron-core or papers although the configuration is theirs: said once."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.utils import log_single_rank

from megatron_eopt.math.coefficients import DIVERGED, resolve_coefficients, response
from megatron_eopt.routing.model import Routing
from megatron_eopt.settings.registry import state_layout_of
from megatron_eopt.settings.settings import Settings

logger = logging.getLogger(__name__)

_said: set[str] = set()

_TAG = "is_managed_by_layer_wise_optimizer"
"""Attribute of parameters that Megatron's wiring of layer-wise storage puts into padded buffers."""


def log_differences(
    settings: Settings,
    routing: Routing,
    arguments: Mapping[str, Mapping[str, Any]],
    tensor_parallel_size: int,
) -> None:
    """Log once, on one rank, what is different for this configuration and model.

    ``arguments`` are those of the emerging optimizers' constructors.
    """
    tagged = sum(bool(getattr(r.parameter.param, _TAG, False)) for r in routing.routes)
    if tagged and settings.storage == "sharded":
        _say(
            logging.WARNING,
            f"{tagged} parameters have the attribute {_TAG}: they lie in Megatron's padded "
            "layer-wise layout, which costs memory and is not needed; wrap the model as for Adam",
        )
    for name, own in arguments.items():
        for sentence in _warnings(name, settings, own, tensor_parallel_size):
            _say(logging.WARNING, sentence)
    if not (settings.is_standard or settings.recommended):
        for sentence in _differences(settings, routing):
            _say(logging.INFO, f"unlike megatron-core: {sentence}")


def _say(level: int, sentence: str) -> None:
    if sentence not in _said:
        _said.add(sentence)
        log_single_rank(logger, level, sentence)


def _differences(settings: Settings, routing: Routing) -> Iterator[str]:
    tables, uneven = [], []
    for route in routing.routes:
        parameter, param = route.parameter, route.parameter.param
        if (
            parameter.is_embedding
            and len(parameter.shape) == 2
            and not getattr(param, "is_embedding_or_output_parameter", False)
            and route.optimizer != settings.optimizer
        ):
            tables.append(parameter.name)
        split = routing.splits.get(param)
        declared = hasattr(param, "eopt_split") or getattr(param, "is_qkv", False)
        if split is not None and split.kind == "qkv" and not declared:
            uneven.append(parameter.name)
    if tables:
        yield (
            f"{', '.join(tables)}: an embedding table goes to {settings.scalar}; megatron-core "
            f"gives it to {settings.optimizer}"
        )
    if uneven:
        yield (
            f"{', '.join(uneven)}: Q, K and V are split although tensor parallelism cuts a query "
            "group; megatron-core orthogonalizes them as one matrix"
        )
    if not settings.decoupled_weight_decay:
        yield (
            "decoupled_weight_decay=False holds for every optimizer; megatron-core ignores it for "
            f"{settings.optimizer}"
        )
    if settings.optimizer == "lion":
        yield "lion takes lion_beta1 and lion_beta2; megatron-core gives it Adam's betas"
    if settings.optimizer == "psgd_pro":
        yield "psgd_pro counts its steps, by which its preconditioner's learning rate falls"
    if settings.half == "bf16" and settings.loss_scale is not None:
        yield "loss_scale holds for every optimizer; megatron-core unscales Adam's only"


def explodes(arguments: Mapping[str, Any]) -> bool:
    """Whether rounding to bfloat16 alone takes a singular value of 1 to where steps diverge."""
    named, steps = arguments.get("coefficient_type"), arguments.get("num_ns_steps")
    if arguments.get("fp32_matmul_prec") != "medium" or named is None or steps is None:
        return False
    rounded = 1 + torch.finfo(torch.bfloat16).eps / 2
    return not abs(response(resolve_coefficients(named, steps), rounded)) < DIVERGED


def _warnings(
    optimizer: str, settings: Settings, arguments: Mapping[str, Any], tensor_parallel_size: int
) -> Iterator[str]:
    """Yield who gets AdaMuon's steps far too long, or an update that depends on the ranks."""
    scale = arguments.get("scale_mode")
    if arguments.get("moment2_method") == "adamuon" and scale in ("spectral", "adamw_rms"):
        yield (
            f"muon_scale_mode={scale!r} with adaptive_muon_moment2_method='adamuon': AdaMuon "
            "brings entries to about 1 by itself, so this scale makes them as large as the root "
            "of the matrix's larger side; 'shape_scaling' with muon_extra_scale_factor=0.2 does not"
        )
    if optimizer == "scion" and settings.weight_decay != 1:
        yield (
            f"weight_decay={settings.weight_decay} takes the place of Scion's own, which is "
            "1: its step is meant to keep weights in a ball, and does so with weight_decay=1 alone"
        )
    if explodes(arguments):
        yield (
            f"muon_coefficient_type={arguments['coefficient_type']!r} with "
            "muon_fp32_matmul_prec='medium': what rounding to bfloat16 makes of a singular value "
            "of 1, as in a gradient of rank one, leaves the interval in which these coefficients "
            "converge, and such an update is huge; 'highest' does not round so"
        )
    splits, owners_split = (
        item.splits_weights_of(optimizer)
        for item in (settings, replace(settings, storage="sharded"))
    )
    if settings.splits and owners_split and not splits:
        yield (
            f"optimizer={optimizer!r} updates a fused weight (Q, K and V; gate and up) as "
            "one matrix without use_distributed_optimizer; with it, each of them by itself"
        )
    if tensor_parallel_size == 1:
        return
    if arguments.get("tp_mode") == "blockwise":
        yield (
            "muon_tp_mode='blockwise' orthogonalizes each tensor-parallel rank's piece by "
            "itself, so the result depends on the number of ranks; 'duplicated' and 'auto' are "
            "exact"
        )
    replicated = settings.storage == "replicated" and state_layout_of(optimizer) != "element_wise"
    if "tp_mode" not in arguments and replicated:
        yield (
            f"optimizer={optimizer!r} updates each tensor-parallel rank's piece of a "
            "matrix by itself, so the result depends on the number of ranks; with "
            "use_distributed_optimizer=True it gets whole matrices"
        )
