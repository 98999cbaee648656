"""Build the optimizers of fragments, one storage per set of Megatron's buffers."""

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.agreement import raise_together, raise_together_in
from megatron_eopt.base.names import DEFAULT_MATRIX_BUFFER_MB
from megatron_eopt.config.checks import refuse_for_overlap
from megatron_eopt.config.settings import RunSettings
from megatron_eopt.matrices import Split, whole
from megatron_eopt.optimizers.assigned_rule import AssignedRule
from megatron_eopt.optimizers.element_wise import ElementWiseRule, optimizer_name
from megatron_eopt.optimizers.exchange import ExchangeConfig
from megatron_eopt.optimizers.muon_settings import declared_split
from megatron_eopt.optimizers.off_loading import off_load
from megatron_eopt.optimizers.sharded_optimizer import ShardedOptimizer
from megatron_eopt.optimizers.specs import OptimizerSpec, update_rule_over
from megatron_eopt.optimizers.update_rule import ParamGroup, UpdateRule, bind
from megatron_eopt.storage.shard import ParamShard
from megatron_eopt.wrappers.zero1.buffers import (
    BufferSet,
    check_buffers,
    data_parallel_only,
    windows_of,
    with_own_group,
)
from megatron_eopt.wrappers.zero1.fragments import BufferRange, fragment_of, ranges_in
from megatron_eopt.wrappers.zero1.optimizer import Zero1Optimizer


@dataclass(frozen=True)
class Sharding:
    """What all storages of one chain share."""

    settings: RunSettings
    chunks: Sequence[Any]  # the wrapped model
    sets: Sequence[BufferSet]  # its buffers
    names: Mapping[Tensor, str]  # names of the parameters
    scaler: Any  # gradient scaler, if any
    # logical matrices by parameter, None for a single one; empty if the optimizers know them
    splits: Mapping[Tensor, Split | None]

    def storage(self, optimizer: Any, buffers: BufferSet) -> Zero1Optimizer:
        """Return Megatron's distributed optimizer over some buffers."""
        storage = Zero1Optimizer(
            optimizer,
            self.settings.config,
            self.scaler,
            model_chunks=list(self.chunks),
            per_model_buffers=buffers.buffers,
            data_parallel_group=buffers.data,
            data_parallel_group_gloo=buffers.data_gloo,
            data_parallel_group_idx=buffers.model_rank,
            distributed_optimizer_instance_id=buffers.instance,
        )
        storage.count_in(buffers.stats, buffers.collection)
        storage.copy = buffers.copy
        return storage

    def split_of(self, optimizer: Any, param: Tensor, shape: tuple[int, ...]) -> Split:
        """Return the logical matrices of a parameter that an optimizer steps."""
        if param in self.splits:
            return self.splits[param] or whole(shape)
        if hasattr(optimizer, "split_of"):
            own: Split = optimizer.split_of(param, shape)
            return own
        # megatron-core's Muon finds the split by the model's parameter, which owners do not have
        return declared_split(optimizer, param, shape)


def unmixed_storages(sharding: Sharding, specs: Sequence[OptimizerSpec]) -> list[Zero1Optimizer]:
    """Return storages with one element-wise optimizer, such as Adam, as in megatron-core.

    State is created by the first step, as in megatron-core, or when it is saved.
    """
    by_kind = {item.is_expert: item for item in sharding.sets}
    storages = []
    for spec in specs:
        assigned = []
        if spec.optimizer is not None:
            # megatron-core's constructor replaces these parameters by this rank's fragments
            bind(spec.optimizer, spec.groups, defaultdict(dict))
            params = [param for group in spec.groups for param in group["params"]]
            assigned = [AssignedRule(_element_wise(sharding, spec, params), spec.optimizer)]
        storage = sharding.storage(spec.optimizer, by_kind[spec.is_expert])
        storage.set_assigned(assigned)
        storages.append(storage)
    return storages


def zero1_storages(sharding: Sharding, specs: Sequence[OptimizerSpec]) -> list[Zero1Optimizer]:
    """Return one storage per set of buffers, with all optimizers; collective.

    Raises a ConfigurationError if a parameter is not in exactly one group, or is not supported.
    """
    if sharding.settings.config.muon_overlap_dp_comm:
        parts = [part for chunk in sharding.chunks for part in (chunk.ddp_config, chunk.config)]
        served = any(spec.looks_ahead for spec in specs)
        raise_together(
            lambda: refuse_for_overlap(sharding.settings.config, parts, is_served=served)
        )
    buffers = [buffer for item in sharding.sets for buffer in item.all_buffers]
    groups = [group for spec in specs for group in spec.groups]
    raise_together(lambda: check_buffers(buffers, groups, sharding.names))
    live: list[list[ParamGroup]] = [[] for _ in specs]
    storages = [_storage(sharding, specs, item, live) for item in sharding.sets]
    raise_together(lambda: [storage.optimizer.refuse_faults() for storage in storages])
    for spec, groups in zip(specs, live, strict=True):
        # callers may edit the groups of their optimizer; state of the model's parameters is freed
        bind(spec.optimizer, groups, defaultdict(dict))
    return storages


def _storage(
    sharding: Sharding,
    specs: Sequence[OptimizerSpec],
    buffers: BufferSet,
    live: Sequence[list[ParamGroup]],
) -> Zero1Optimizer:
    """Return the storage of one set of buffers; its groups go to ``live``, by optimizer."""
    places = ranges_in(buffers, sharding.names)
    groups: list[ParamGroup] = []
    served: list[tuple[UpdateRule, slice]] = []
    numbers = []
    for number, spec in enumerate(specs):
        own_groups = _groups_in(spec, places, is_expert=buffers.is_expert)
        if not own_groups:
            continue
        members = {param for group in own_groups for param in group["params"]}
        of_base = {param: place for param, place in places.items() if param in members}
        update_rule = _update_rule_of(sharding, spec, of_base, buffers)
        update_rule.is_clipped = spec.is_clipped
        numbers.append(number)
        served.append((update_rule, slice(len(groups), len(groups) + len(own_groups))))
        groups += own_groups
    composite = ShardedOptimizer(groups, served, sharding.names)
    storage = sharding.storage(composite, buffers)
    storage.set_assigned(composite.assigned)
    composite.init_state()
    for number, item in zip(numbers, composite.assigned, strict=True):
        live[number].extend(item.groups())
    if sharding.settings.offload_fraction:
        off_load(composite, sharding.settings)
    return storage


def _element_wise(
    sharding: Sharding, spec: OptimizerSpec, params: Iterable[Tensor]
) -> ElementWiseRule:
    shards = [ParamShard(sharding.names[param], param) for param in params]
    config = sharding.settings.config
    return ElementWiseRule(spec.optimizer, spec.init_state_fn, config, shards)


def _update_rule_of(
    sharding: Sharding,
    spec: OptimizerSpec,
    places: Mapping[Tensor, BufferRange],
    buffers: BufferSet,
) -> UpdateRule:
    """Return the update rule of an optimizer's parameters at ``places`` of the buffers."""
    settings = sharding.settings
    # a pipeline stage may have no matrices
    if spec.layout == "element_wise" or not places:
        return _element_wise(sharding, spec, places)
    grid = buffers.grid
    assert grid is not None
    # in mode ``blockwise``, each tensor-parallel slab is orthogonalized as a matrix of its own
    slabs = spec.layout == "matrix_update" and spec.optimizer.tp_mode == "blockwise"
    if slabs:
        grid = data_parallel_only(grid, buffers.data)
    overlaps = settings.config.muon_overlap_dp_comm and spec.looks_ahead
    split_of = functools.partial(sharding.split_of, spec.optimizer)
    members = with_own_group(grid) if overlaps else grid
    shards = raise_together_in(
        grid.ranks.group,
        lambda: [
            fragment_of(param, place, split_of, members, slabs=slabs)
            for param, place in places.items()
        ],
    )
    is_usual = settings.config.matrix_buffer_mb >= DEFAULT_MATRIX_BUFFER_MB
    # with owners, a rank sends and receives its share of a matrix twice, however many ranks
    exchange_config = ExchangeConfig(
        "exchange",
        matrix_buffer_mb=settings.config.matrix_buffer_mb,
        device=torch.device("cuda", torch.cuda.current_device()),
        max_ranks_per_matrix=settings.config.muon_max_ranks_per_matrix,
        windows=windows_of(list(places), sharding.chunks) if overlaps else (),
        # a smaller wave saves memory on purpose, and off-loading needs small ones
        grows=is_usual and not settings.offload_fraction,
    )
    return update_rule_over(spec, shards, exchange_config, settings.config)


def _groups_in(
    spec: OptimizerSpec, places: Mapping[Tensor, Any], *, is_expert: bool
) -> list[ParamGroup]:
    """Return an optimizer's groups with the parameters of one set of buffers.

    Empty groups are kept, because other pipeline stages may have parameters in them.
    """
    groups = []
    for group in spec.groups:
        members = [param for param in group["params"] if param in places]
        is_here = bool(members) or (
            bool(group.get("is_expert_parallel")) == is_expert
            and not any(param.requires_grad for param in group["params"])
        )
        if is_here:
            name = optimizer_name(spec.optimizer).lower()
            groups.append({"optimizer": name, **group, "params": members})
    return groups
