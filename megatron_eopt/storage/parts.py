"""From base torch optimizers to the composite of one buffer set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from torch import Tensor

from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.optimizers.registry import StateLayoutT, entries
from megatron_eopt.storage.buffer_sets import BufferSet
from megatron_eopt.storage.composite import CompositeOptimizer, InitState, ParamGroup, SavedPart
from megatron_eopt.storage.element_wise import ElementWisePart
from megatron_eopt.storage.fragments import BufferPlace, locate, stored_parameter
from megatron_eopt.storage.matrix_state import MatrixStatePart
from megatron_eopt.storage.matrix_update import MatrixUpdatePart
from megatron_eopt.storage.redistribution_groups import data_parallel_only

__all__ = ["Base", "build_composite", "state_layout"]

_ELEMENT_WISE = frozenset(
    {
        # fused ones where Transformer Engine or Apex is installed
        megatron_optimizer.Adam,
        megatron_optimizer.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.SGD,
    }
)


@dataclass(frozen=True)
class Base:
    """A base optimizer as the user passed it.

    Attributes:
        optimizer: The torch optimizer.
        init_state_fn: Makes its state exist; may be None.
    """

    optimizer: torch.optim.Optimizer
    init_state_fn: InitState


def state_layout(optimizer: torch.optim.Optimizer) -> StateLayoutT:
    """Return what of an optimizer needs whole matrices; everything, if its class is not known."""
    if type(optimizer) is TensorParallelMuon:
        return "matrix_update"
    for entry in entries().values():
        if type(optimizer) is entry.optimizer_cls:
            # other orthogonalizing optimizers step by themselves, on whole matrices
            return "element_wise" if entry.state_layout == "element_wise" else "matrix_state"
    return "element_wise" if type(optimizer) in _ELEMENT_WISE else "matrix_state"


def build_composite(
    bases: Sequence[Base],
    buffer_set: BufferSet,
    names: Mapping[Tensor, str],
    config: Any,
) -> CompositeOptimizer:
    """Return the composite that steps the parameters of one buffer set.

    Args:
        bases: All base optimizers.
        buffer_set: The buffers.
        names: Names of the parameters.
        config: An ``OptimizerConfig``.
    """
    places = locate(buffer_set.all_buffers, names)
    groups: list[list[ParamGroup]] = []
    parts: list[SavedPart] = []
    for base in bases:
        mine = groups_in(base.optimizer, places, is_expert=buffer_set.is_expert)
        if not mine:
            continue
        groups.append(mine)
        layout = state_layout(base.optimizer)
        if layout == "element_wise":
            parts.append(ElementWisePart(base.optimizer, base.init_state_fn, config))
            continue
        parts.append(_matrix_part(base, layout, mine, buffer_set, places, config))
    return CompositeOptimizer(groups, parts)


def _matrix_part(
    base: Base,
    layout: StateLayoutT,
    groups: list[ParamGroup],
    buffer_set: BufferSet,
    places: Mapping[Tensor, BufferPlace],
    config: Any,
) -> SavedPart:
    optimizer: Any = base.optimizer
    members = {param for group in groups for param in group["params"]}
    params = [param for param in places if param in members]
    ranks = buffer_set.ranks
    slabs = layout == "matrix_update" and optimizer.tp_mode == "blockwise"
    if slabs:
        ranks = data_parallel_only(ranks, buffer_set.data)
    stored = [stored_parameter(p, places[p], optimizer, ranks, slabs=slabs) for p in params]
    if layout == "matrix_update":
        return MatrixUpdatePart(optimizer, stored, params, ranks.group)
    init_state_fn = base.init_state_fn
    return MatrixStatePart(optimizer, stored, params, groups, ranks.group, init_state_fn, config)


def groups_in(
    optimizer: torch.optim.Optimizer, places: Mapping[Tensor, Any], *, is_expert: bool
) -> list[ParamGroup]:
    """Return an optimizer's groups, cut down to the parameters of one buffer set.

    Groups without members here stay, since other pipeline stages may have some.

    Args:
        optimizer: A base optimizer; its groups are not changed.
        places: The set's parameters.
        is_expert: Whether these are experts'.
    """
    groups = []
    for group in optimizer.param_groups:
        members = [param for param in group["params"] if param in places]
        trained = [param for param in group["params"] if param.requires_grad]
        if members or (not trained and bool(group.get("is_expert_parallel")) == is_expert):
            name = type(optimizer).__name__.lower()
            groups.append({"optimizer": name, **group, "params": members})
    return groups
