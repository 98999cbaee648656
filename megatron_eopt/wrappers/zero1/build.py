"""Build the optimizers of fragments, one storage per set of Megatron's buffers."""

import functools
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.agreement import raise_together, raise_together_in
from megatron_eopt.base.names import DEFAULT_MATRIX_BUFFER_MB
from megatron_eopt.config.checks import refuse_for_overlap
from megatron_eopt.config.settings import RunSettings
from megatron_eopt.matrices import Split, whole
from megatron_eopt.optimizers.assigned_rule import AssignedRule
from megatron_eopt.optimizers.build import build_over, element_wise_rule
from megatron_eopt.optimizers.element_wise import optimizer_name
from megatron_eopt.optimizers.exchange import ExchangeConfig
from megatron_eopt.optimizers.muon_settings import declared_split
from megatron_eopt.optimizers.off_loading import off_load
from megatron_eopt.optimizers.specs import OptimizerSpec
from megatron_eopt.optimizers.update_rule import ParamGroup, bind
from megatron_eopt.storage.shard import ParamShard
from megatron_eopt.wrappers.zero1.buffers import (
    BufferSet,
    check_buffers,
    data_parallel_only,
    windows_of,
    with_own_group,
)
from megatron_eopt.wrappers.zero1.fragments import fragment_of, ranges_in
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
        # megatron-core's constructor replaces these parameters by this rank's fragments
        bind(spec.optimizer, spec.groups, defaultdict(dict))
        params = (param for group in spec.groups for param in group["params"])
        names = {param: sharding.names[param] for param in params}
        rule = element_wise_rule(spec, names, sharding.settings.config)
        storage = sharding.storage(spec.optimizer, by_kind[spec.is_expert])
        storage.set_assigned([AssignedRule(rule, spec.optimizer)])
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
    source = FragmentSource(sharding, buffers)
    # in the order of the buffers, by which each rank knows the windows of a step
    names = {param: sharding.names[param] for param in source.places}
    own = [replace(s, groups=_groups_in(s, names, is_expert=buffers.is_expert)) for s in specs]
    config = sharding.settings.config
    composite = build_over([spec for spec in own if spec.groups], names, source, config)
    storage = sharding.storage(composite, buffers)
    storage.set_assigned(composite.assigned)
    composite.init_state()
    groups = iter(composite.param_groups)
    for of_spec, spec in zip(live, own, strict=True):
        of_spec.extend(islice(groups, len(spec.groups)))
    if sharding.settings.offload_fraction:
        off_load(composite, sharding.settings)
    return storage


class FragmentSource:
    """Knows which ranks store which fragments of the parameters of one set of buffers."""

    def __init__(self, sharding: Sharding, buffers: BufferSet) -> None:
        self._sharding, self._buffers = sharding, buffers
        self.places = ranges_in(buffers, sharding.names)

    def kind_of(self, param: Tensor) -> None:
        """Return None, because the same ranks store all parameters."""

    def shards(
        self, spec: OptimizerSpec, params: Mapping[str, Tensor]
    ) -> tuple[list[ParamShard], ExchangeConfig]:
        """Return the shards of some parameters, and how they are exchanged; collective."""
        settings, buffers = self._sharding.settings, self._buffers
        grid = buffers.grid
        assert grid is not None
        # in mode ``blockwise``, each tensor-parallel slab is orthogonalized as a matrix of its own
        slabs = spec.layout == "matrix_update" and spec.optimizer.tp_mode == "blockwise"
        if slabs:
            grid = data_parallel_only(grid, buffers.data)
        overlaps = settings.config.muon_overlap_dp_comm and spec.looks_ahead
        split_of = functools.partial(self._sharding.split_of, spec.optimizer)
        members = with_own_group(grid) if overlaps else grid
        shards = raise_together_in(
            grid.ranks.group,
            lambda: [
                fragment_of(param, self.places[param], split_of, members, slabs=slabs)
                for param in params.values()
            ],
        )
        windows = windows_of(list(params.values()), self._sharding.chunks) if overlaps else ()
        is_usual = settings.config.matrix_buffer_mb >= DEFAULT_MATRIX_BUFFER_MB
        # with owners, a rank sends and receives its share of a matrix twice, however many ranks
        return shards, ExchangeConfig(
            "exchange",
            matrix_buffer_mb=settings.config.matrix_buffer_mb,
            device=torch.device("cuda", torch.cuda.current_device()),
            max_ranks_per_matrix=settings.config.muon_max_ranks_per_matrix,
            windows=windows,
            # a smaller wave saves memory on purpose, and off-loading needs small ones
            grows=is_usual and not settings.offload_fraction,
        )


def _groups_in(
    spec: OptimizerSpec, places: Container[Tensor], *, is_expert: bool
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
