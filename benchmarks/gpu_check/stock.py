"""Builds megatron-core's own Muon as one rank of a large job, to compare it with ours.

Its layer-wise optimizer gives each data-parallel rank some of the weights, each of them whole.
Adam's weights are sharded like ours. With ``duplicated``, every tensor-parallel rank computes all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args

import numpy as np
from emerging_optimizers.orthogonalized_optimizers.muon import MuonScaleT
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from torch import Tensor, distributed

from megatron_eopt.base.agreement import group_ranks_in
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.config.settings import resolve
from megatron_eopt.math.algorithm import standard_flops
from megatron_eopt.tools.plan.architectures import Architecture
from megatron_eopt.tools.plan.model import ParallelLayout, build_stage
from megatron_eopt.wrappers.config import EmergingOptimizerConfig

REFUSALS = (AssertionError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What megatron-core raises for settings and layouts that it does not support."""

_KINDS = ("muon", "adaptive_muon")


@dataclass(frozen=True)
class Share:
    """Which matrices megatron-core gives a rank."""

    matrices: int  # that this rank computes
    of: int  # that the ranks with the same weights compute together
    busiest: float  # FLOPs of the stage's busiest rank, over this rank's; inf if it has none


def settings_of(config: EmergingOptimizerConfig) -> tuple[OptimizerConfig, list[str]]:
    """Return megatron-core's configuration, and a sentence for each setting that it lacks.

    Raises:
        ConfigurationError: If the optimizer is not one of its Muons.
    """
    settings = resolve(config)
    if settings.optimizer not in _KINDS:
        rule = f"is not compared with megatron-core's: only {' and '.join(_KINDS)} are"
        raise ConfigurationError("--optimizer", settings.optimizer, rule, "Compare one of these")
    full, notes = settings.config, []
    given = {f.name: getattr(full, f.name) for f in fields(OptimizerConfig) if f.init}
    scale, scales = given["muon_scale_mode"], get_args(MuonScaleT)
    if scale not in scales:
        notes.append(f"it has no scale mode {scale}, so it runs spectral, which takes as long")
        given["muon_scale_mode"] = "spectral"
    if "per_head" in settings.splits:
        notes.append("it has no matrix per head, so it orthogonalizes larger matrices")
    if given["muon_tp_mode"] not in ("blockwise", "duplicated", "distributed"):
        given["muon_tp_mode"] = "duplicated"
    given["use_distributed_optimizer"] = False
    given["use_layer_wise_distributed_optimizer"] = True
    return OptimizerConfig(**given), notes


def stock_muon(
    architecture: Architecture, layout: ParallelLayout, config: OptimizerConfig
) -> tuple[Any, Any]:
    """Build this rank's model chunk and megatron-core's optimizer.

    Raises:
        ConfigurationError: If megatron-core does not support the layout or the settings.
    """
    model = build_stage(architecture, layout, layer_wise=True)
    return model, megatron_optimizer.get_megatron_optimizer(config, [model])


def share_of(optimizer: Any, model: Any, layout: ParallelLayout) -> Share:
    """Return what a layer-wise optimizer computes on this rank, and how uneven ranks are."""
    links = getattr(optimizer, "chained_optimizers", [])
    link = next((o for o in links if isinstance(o, LayerWiseDistributedOptimizer)), optimizer)
    matrices = [p for p in model.parameters() if p.is_managed_by_layer_wise_optimizer]
    rank, loads = distributed.get_rank(), np.zeros(layout.world_size)
    computed = 0
    for experts, lists, group in (
        (False, link.dp_cp_params_list, link.dp_cp),
        (True, link.expt_dp_params_list, link.expt_dp),
    ):
        parts = (layout.expert_tensor if experts else layout.tensor) or 1
        if lists is None:  # this rank has all of them
            own = [p for p in matrices if experts != getattr(p, "allreduce", True)]
            loads += _flops(own, parts)
        else:
            (places,) = group_ranks_in([group])
            each = [_flops(params, parts) for params in lists]
            loads += [each[place.number] for place in places]
            own = lists[places[rank].number]
        computed += len(own)
    mine = float(loads[rank])
    return Share(computed, len(matrices), float(loads.max()) / mine if mine else math.inf)


def _flops(params: Sequence[Tensor], parts: int) -> float:
    """Return the FLOPs of parameters that tensor parallelism cuts into ``parts``."""
    shapes = [list(param.shape) for param in params]
    for param, shape in zip(params, shapes, strict=True):
        if (cut := getattr(param, "partition_dim", -1)) >= 0:
            shape[cut] *= parts
    return math.fsum(standard_flops(*shape) for shape in shapes)
