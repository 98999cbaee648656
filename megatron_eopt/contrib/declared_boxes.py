"""Plain tensors, each a box of its parameter: some rows, some columns, or all of it.

The code that cuts the model sets ``param.eopt_place``; see
:class:`megatron_eopt.base.place.DeclaredBox`.
"""

from collections.abc import Hashable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base.agreement import gather_objects, raise_together, raise_together_in
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import PLACE_ATTRIBUTE
from megatron_eopt.base.place import declared_box
from megatron_eopt.config.settings import Settings
from megatron_eopt.fsdp2.optimizer import DTensorOptimizer
from megatron_eopt.layouts import Layout, block_layout
from megatron_eopt.layouts.boxes import weights_of
from megatron_eopt.matrices import whole
from megatron_eopt.optimizers.build import build_routed
from megatron_eopt.optimizers.exchange import ExchangeConfig
from megatron_eopt.optimizers.specs import OptimizerSpec
from megatron_eopt.routing.model import Routing
from megatron_eopt.routing.parameters import check_dtypes
from megatron_eopt.storage.shard import ParamShard, Ranks, box_layouts
from megatron_eopt.wrappers.builders import OptimizerBuildContext
from megatron_eopt.wrappers.chain import OptimizerChain
from megatron_eopt.wrappers.gradients import make_scaler
from megatron_eopt.wrappers.replicated import check_half
from megatron_eopt.wrappers.torch_fsdp2 import chain_of_shards


class PlacedShards:
    """Which ranks of one group store which boxes of some parameters; the constructor is collective.

    Several ranks may store the same box. The first of them is the source, whose copy counts.

    Raises:
        ConfigurationError: On all ranks, if a parameter has no place, ranks have different
            parameters, or their boxes overlap or have gaps.
    """

    def __init__(
        self, settings: Settings, routing: Routing, group: dist.ProcessGroup | None
    ) -> None:
        self._settings, self._matrices = settings, routing.matrices
        self._ranks, names = Ranks.of(group), routing.names
        # a parameter without a place must raise before the others wait for this rank's places
        described = raise_together_in(group, lambda: [_described(p, n) for p, n in names.items()])
        of_ranks = (
            gather_objects(described, group) if self._ranks.group is not None else [described]
        )
        if any(_wholes(of_rank) != _wholes(described) for of_rank in of_ranks):
            rule = (
                "must be parts of the same parameters, in the same order, on all ranks of a group"
            )
            hint = "Give every rank of the group its part of each parameter, even an empty one"
            raise ConfigurationError(PLACE_ATTRIBUTE, [n for n, *_ in described][:8], rule, hint)
        # first and last indices of each rank's box, and whether its copy counts
        self._boxes = {
            param: _BoxesOfRanks([of_rank[number][1:3] for of_rank in of_ranks])
            for number, param in enumerate(names)
        }
        for (param, boxes), (name, *_, shape) in zip(self._boxes.items(), described, strict=True):
            if not boxes.cover(shape):
                rule = "does not store every element once, on all ranks of the group together"
                hint = "Correct the offsets; several ranks may store the same box, as copies"
                argument = f"{name}.{PLACE_ATTRIBUTE}"
                raise ConfigurationError(argument, declared_box(param), rule, hint)

    def kind_of(self, param: Tensor) -> Hashable:
        """Return whether ranks store different parts."""
        return bool(self._boxes[param].is_first[1:].any())

    def counts(self, param: Tensor) -> bool:
        """Return whether this rank's copy counts in sums over the group."""
        return bool(self._boxes[param].is_first[self._ranks.rank])

    def shards(
        self, spec: OptimizerSpec, params: Mapping[str, Tensor]
    ) -> tuple[list[ParamShard], ExchangeConfig]:
        """Return the shards of some parameters, and how they are exchanged."""

        def made() -> list[ParamShard]:
            return [self._shard(name, param) for name, param in params.items()]

        # each matrix is computed on one rank, whatever the mode for tensor-parallel shards
        first = next(iter(params.values()))
        buffer_mb = self._settings.config.matrix_buffer_mb
        config = ExchangeConfig("exchange", buffer_mb, device=first.device)
        return raise_together_in(self._ranks.group, made), config

    def _shard(self, name: str, param: Tensor) -> ParamShard:
        split = self._matrices[param] or whole(_whole(param))
        layout = self._boxes[param].layout(_whole(param), split.cols, name)
        layouts = box_layouts(split, layout)
        return ParamShard(name, param, split, layouts, self._ranks, tuple(param.shape))


type _Described = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Name, offset, local shape and whole shape of a parameter."""


def _described(param: Tensor, name: str) -> _Described:
    box = declared_box(param, name)
    if box is None:
        rule = "must be set on every parameter, also on those that each rank stores as a whole"
        hint = "For these, set it to ((0, 0), param.shape), with one 0 for each dimension"
        raise ConfigurationError(f"{name}.{PLACE_ATTRIBUTE}", None, rule, hint)
    return name, box.offset, tuple(param.shape), box.shape


def _wholes(described: Sequence[_Described]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, whole) for name, _, _, whole in described]


def _whole(param: Tensor) -> tuple[int, ...]:
    box = declared_box(param)
    assert box is not None
    return box.shape


class _BoxesOfRanks:
    """The box of one parameter on each rank."""

    def __init__(self, boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        self.low = np.array([offset for offset, _ in boxes], np.int64)
        self.high = self.low + np.array([shape for _, shape in boxes], np.int64)
        # from the last rank to the first, so that the lowest rank of equal boxes remains
        first = {box: rank for rank, box in reversed(list(enumerate(boxes)))}
        self.is_first = np.array([first[box] == rank for rank, box in enumerate(boxes)])

    def cover(self, whole: tuple[int, ...]) -> bool:
        """Return whether the boxes, each copy counted once, are the whole parameter."""
        covered = weights_of(self.low, self.high)[self.is_first].sum()
        return bool(covered == weights_of(np.zeros(len(whole), np.int64), np.array(whole)))

    def layout(self, whole: tuple[int, ...], cols: int, name: str) -> Layout:
        ranks = np.arange(len(self.low))
        return block_layout(whole, self.low, self.high, ranks, self.is_first, cols=cols, name=name)


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
    source = PlacedShards(settings, routing, group)
    for param in routing.names:
        if not source.counts(param):
            # megatron-core then leaves it out of gradient norms and counts of zeros
            param.shared = True  # type: ignore[attr-defined]
    inner: Any = build_routed(settings, routing, source, DTensorOptimizer)
    alone: Any = SimpleNamespace(tp=_Alone(), expt_tp=_Alone())
    scaler = make_scaler(settings) if settings.half else None
    return chain_of_shards(inner, context, norm_group or group, alone, scaler)
