"""Build the chain for plain tensors, each a part of its parameter."""

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from megatron_eopt.base.agreement import raise_together
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.config.checks import refuse_for_matrices
from megatron_eopt.routing.parameters import check_dtypes
from megatron_eopt.storage.placed import PlacedShards
from megatron_eopt.wrappers.builders import OptimizerBuildContext
from megatron_eopt.wrappers.chain import OptimizerChain
from megatron_eopt.wrappers.dtensors import build_routed, chain_of_shards
from megatron_eopt.wrappers.gradients import make_scaler
from megatron_eopt.wrappers.replicated import check_half


class _Alone:
    """Stands in for the tensor-parallel group, because :class:`PlacedShards` knows all copies."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def build_sharded(
    context: OptimizerBuildContext,
    group: dist.ProcessGroup,
    *,
    norm_group: dist.ProcessGroup | None = None,
) -> OptimizerChain:
    """Return the chain for parameters of which each rank stores a part; collective over ``group``.

    Every parameter is a plain tensor with the attribute ``eopt_place = (offset, shape)``: this
    rank's tensor is the box at ``offset`` of a parameter of this whole ``shape``. For rows, that is
    ``((first_row, 0), (rows, columns))``. Set it before the optimizer is built. Ranks may have any
    number of rows, including none, and several ranks may have copies. Gradients are this rank's
    part of the whole gradient, in ``main_grad`` or ``grad``.

    Checkpoints need the same boxes in the model's ``sharded_state_dict``.

    Args:
        context: Settings, routing and model.
        group: All ranks that store parts of these parameters.
        norm_group: Ranks over which the gradient norm is summed, if more than ``group``; each part
            of the model must be on one group among them.

    Raises:
        ConfigurationError: If a parameter has no place, parts overlap or are missing, or a setting
            is not supported.
    """
    settings, routing = context.settings, context.routing

    def check() -> None:
        refuse_for_matrices(settings.config)
        off_loads = settings.offload_fraction > 0
        overlaps = settings.config.muon_overlap_dp_comm
        modes = {"optimizer_cpu_offload": off_loads, "muon_overlap_dp_comm": overlaps}
        for name in (name for name, is_on in modes.items() if is_on):
            rule = "is not supported by this storage"
            raise ConfigurationError(name, True, rule, f"Set {name}=False")
        check_dtypes(routing.names, "This storage", double=not settings.half)
        if not settings.half:
            check_half(routing)

    raise_together(check)
    source = PlacedShards(routing.names, group)
    for param in routing.names:
        if not source.counts(param):
            # megatron-core then leaves it out of gradient norms and counts of zeros
            param.shared = True  # type: ignore[attr-defined]
    # each matrix is computed on one rank, whatever the mode for tensor-parallel shards
    inner = build_routed(settings.having(muon_tp_mode="exchange"), routing, source=source)
    alone: Any = SimpleNamespace(tp=_Alone(), expt_tp=_Alone())
    scaler = make_scaler(settings.loss_scale) if settings.half else None
    return chain_of_shards(inner, context, norm_group or group, alone, scaler)
