"""Who gets an update that depends on the ranks, or steps far too long, is told so once."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.utils import log_single_rank

from megatron_eopt.math.coefficients import DIVERGED, resolve_coefficients, response
from megatron_eopt.settings.registry import state_layout_of
from megatron_eopt.settings.settings import Settings

logger = logging.getLogger(__name__)

_said: set[str] = set()


def log_differences(
    settings: Settings, arguments: Mapping[str, Mapping[str, Any]], tensor_parallel_size: int
) -> None:
    """Warn once, on one rank, of what this configuration trains unlike what one may expect.

    ``arguments`` are those of the emerging optimizers' constructors.
    """
    for name, own in arguments.items():
        for sentence in _warnings(name, settings, own, tensor_parallel_size):
            if sentence not in _said:
                _said.add(sentence)
                log_single_rank(logger, logging.WARNING, sentence)


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
