"""Warnings of configurations that train in a way that users may not expect."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_eopt.base.log import warn
from megatron_eopt.config.registry import is_muon, steps_matrices
from megatron_eopt.config.settings import Settings
from megatron_eopt.math import resolve_coefficients, sound_precision
from megatron_eopt.math.orthogonalize import scale_factor

logger = logging.getLogger(__name__)

_said: set[str] = set()
"""Warnings that this process has logged."""


def log_differences(
    settings: Settings,
    arguments: Mapping[str, Mapping[str, Any]],
    *,
    is_cut: bool = False,
) -> None:
    """Warn once, on one rank, if this configuration trains in a way that users may not expect.

    Args:
        settings: The configuration.
        arguments: The constructor arguments of each emerging optimizer.
        is_cut: Whether ranks may have parts of a matrix, without data parallelism.
    """
    for name in arguments:
        for sentence in _warnings(name, settings, arguments[name], is_cut):
            if sentence not in _said:
                _said.add(sentence)
                warn(logger, sentence)


def _warnings(
    optimizer: str, settings: Settings, arguments: Mapping[str, Any], is_cut: bool
) -> Iterator[str]:
    scale = arguments.get("scale_mode", "spectral")
    is_adamuon = arguments.get("moment2_method") == "adamuon"
    if is_adamuon and scale_factor(2, 2, scale) > scale_factor(1, 1, scale):
        yield (
            f"muon_scale_mode={scale!r} with adaptive_muon_moment2_method='adamuon' makes updates "
            "too large: their entries are about 1 already, and this scale grows with the matrix. "
            "Pass muon_scale_mode='shape_scaling' and muon_extra_scale_factor=0.2."
        )
    coefficients, precision = arguments.get("coefficient_type"), arguments.get("fp32_matmul_prec")
    if is_muon(optimizer) and coefficients is not None and precision is not None:
        schedule = resolve_coefficients(coefficients, arguments["num_ns_steps"])
        if sound_precision(schedule, precision) != precision:
            yield (
                f"muon_coefficient_type={coefficients!r} diverges on matrices of low rank with "
                f"muon_fp32_matmul_prec={precision!r}, so products are computed in float32, "
                "which is slower. Pass other coefficients for faster steps."
            )
    decay = settings.config.weight_decay
    if optimizer == "scion" and decay != 1:
        yield (
            f"weight_decay={decay} takes the place of Scion's own, which is 1. "
            "Scion keeps weights inside a norm ball only with weight_decay=1."
        )
    splits, owners_split = (
        item.splits_weights_of(optimizer)
        for item in (settings, replace(settings, storage="sharded"))
    )
    if settings.splits and owners_split and not splits:
        yield (
            f"optimizer={optimizer!r} updates a fused weight (Q, K and V; gate and up) as "
            "one matrix without use_distributed_optimizer. Set it to True to update Q, K, V, "
            "gate and up as separate matrices."
        )
    nowhere = settings.storage == "replicated" and not settings.of_dtensors
    if settings.offload_fraction and nowhere:
        yield (
            "optimizer_cpu_offload=True: all optimizer state stays on the GPU. Set "
            "use_distributed_optimizer=True, which off-loading needs."
        )
    mode, by_owners = arguments.get("tp_mode"), settings.storage == "sharded"
    if mode in ("duplicated", "distributed") and by_owners and not settings.of_dtensors:
        yield (
            f"muon_tp_mode={mode!r} has no effect with the distributed optimizer, which always "
            "computes as 'exchange' does: each matrix on one rank or a few, with the same update."
        )
    if not is_cut:
        return
    if mode == "blockwise":
        yield (
            "muon_tp_mode='blockwise' orthogonalizes each rank's part of a matrix separately, so "
            "the result depends on the number of ranks. With 'duplicated' or 'auto' it does not."
        )
    replicated = settings.storage == "replicated" and steps_matrices(optimizer)
    if replicated and "tp_mode" not in arguments:
        yield (
            f"optimizer={optimizer!r} updates each rank's part of a matrix separately, so the "
            "result depends on the number of ranks. Set use_distributed_optimizer=True to update "
            "whole matrices."
        )
