"""Build the optimizers of ZeRO-1 fragments, one stepper per set of Megatron's buffers."""

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.address import address_of
from megatron_eopt.base.agreement import agreed, agreed_in
from megatron_eopt.config.checks import refuse_for_overlap
from megatron_eopt.config.settings import RunSettings
from megatron_eopt.matrices import Split, whole
from megatron_eopt.optimizers.driver import CompositeOptimizer, Driver, ParamGroup, bind
from megatron_eopt.optimizers.element_wise import ElementWiseDriver
from megatron_eopt.optimizers.engine import Means
from megatron_eopt.optimizers.host_memory import HostPlace, on_device
from megatron_eopt.optimizers.muon import declared_split
from megatron_eopt.optimizers.stepper import Stepper
from megatron_eopt.storage import zero1
from megatron_eopt.storage.buffers import BufferSet, check_buffers, data_parallel_only
from megatron_eopt.storage.interface import Storage
from megatron_eopt.wrappers.bases import Base, driver_over
from megatron_eopt.wrappers.overlap import windows_of


@dataclass(frozen=True)
class Sharding:
    """What all steppers of one chain share."""

    settings: RunSettings
    chunks: Sequence[Any]  # the wrapped model
    sets: Sequence[BufferSet]  # its buffers
    names: Mapping[Tensor, str]  # names of the parameters
    scaler: Any  # gradient scaler, if any
    # logical matrices by parameter, None for a single one; empty if the optimizers know them
    splits: Mapping[Tensor, Split | None]

    def storage(self, optimizer: Any, buffers: BufferSet) -> zero1.FragmentsOptimizer:
        """Return Megatron's distributed optimizer over some buffers."""
        storage = zero1.FragmentsOptimizer(
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


def unmixed_steppers(sharding: Sharding, bases: Sequence[Base]) -> list[Stepper]:
    """Return steppers with one element-wise optimizer, such as Adam, as in megatron-core.

    State is created by the first step, as in megatron-core, or when it is saved.
    """
    by_kind = {item.is_expert: item for item in sharding.sets}
    steppers = []
    for base in bases:
        drivers = []
        if base.optimizer is not None:
            bind(base.optimizer, base.groups, defaultdict(dict))
            config = sharding.settings.config
            drivers = [ElementWiseDriver(base.optimizer, base.init_state_fn, config)]
        storage = sharding.storage(base.optimizer, by_kind[base.is_expert])
        steppers.append(_numbered(Stepper(storage, drivers), {}))
    return steppers


def sharded_steppers(sharding: Sharding, bases: Sequence[Base]) -> list[Stepper]:
    """Return one stepper per set of buffers, with all optimizers; collective.

    Raises a ConfigurationError if a parameter is not in exactly one group, or is not supported.
    """
    if sharding.settings.overlaps_step:
        parts = [part for chunk in sharding.chunks for part in (chunk.ddp_config, chunk.config)]
        agreed(lambda: refuse_for_overlap(sharding.settings.config, parts))
    buffers = [buffer for item in sharding.sets for buffer in item.all_buffers]
    groups = [group for base in bases for group in base.groups]
    agreed(lambda: check_buffers(buffers, groups, sharding.names))
    live: list[list[ParamGroup]] = [[] for _ in bases]
    steppers = [_stepper(sharding, bases, item, live) for item in sharding.sets]
    agreed(lambda: [stepper.storage.optimizer.refuse_faults() for stepper in steppers])
    for base, groups in zip(bases, live, strict=True):
        # callers may edit the groups of their optimizer; state of the model's parameters is freed
        bind(base.optimizer, groups, defaultdict(dict))
    return steppers


def _stepper(
    sharding: Sharding, bases: Sequence[Base], buffers: BufferSet, live: Sequence[list[ParamGroup]]
) -> Stepper:
    """Return the stepper of one set of buffers; its groups are appended to ``live``, by base."""
    places = zero1.ranges_in(buffers, sharding.names)
    groups: list[ParamGroup] = []
    served: list[tuple[Driver, slice]] = []
    params: dict[Driver, list[Tensor]] = {}
    drivers = {}
    for number, base in enumerate(bases):
        mine = _groups_in(base, places, is_expert=buffers.is_expert)
        if not mine:
            continue
        members = {param for group in mine for param in group["params"]}
        of_base = {param: place for param, place in places.items() if param in members}
        driver = _driver(sharding, base, mine, of_base, buffers)
        driver.is_clipped = base.is_clipped
        drivers[number] = driver
        served.append((driver, slice(len(groups), len(groups) + len(mine))))
        groups += mine
        if driver.shards:
            params[driver] = list(of_base)
    composite = CompositeOptimizer(groups, served)
    storage = sharding.storage(composite, buffers)
    stepper = _numbered(Stepper(storage, composite.drivers), params)
    composite.init_state()
    for number, driver in drivers.items():
        live[number].extend(composite.groups_of(driver))
    if sharding.settings.offload_fraction:
        _off_load(composite, storage, sharding.settings)
    return stepper


def _off_load(composite: CompositeOptimizer, storage: Storage, settings: RunSettings) -> None:
    """Off-load a fraction of main weights and state to host memory."""
    items = list(storage.stored())
    own = [i.main for i in items if address_of(i.main)[0] != address_of(i.param)[0]]
    place = HostPlace(
        settings.offload_fraction,
        frozenset(own),  # not the model's own weights, which float32 training steps
        items[0].main.device if items else "cpu",
        int(settings.wave_mb * 2**20),
    )
    for driver in composite.drivers:
        with composite.groups_and_state(driver) as (groups, state):
            driver.off_load(groups, state, place)
    storage.collect_gradients = functools.partial(  # type: ignore[method-assign]
        on_device, [driver.host for driver in composite.drivers], storage.collect_gradients
    )


def _driver(
    sharding: Sharding,
    base: Base,
    groups: Sequence[ParamGroup],
    places: Mapping[Tensor, zero1.BufferRange],
    buffers: BufferSet,
) -> Driver:
    """Return the driver of an optimizer's parameters at ``places`` of the buffers."""
    config = sharding.settings.config
    # a pipeline stage may have no matrices
    if base.layout == "element_wise" or not places:
        return ElementWiseDriver(base.optimizer, base.init_state_fn, config)
    grid = buffers.grid
    assert grid is not None
    slabs = base.layout == "matrix_update" and base.optimizer.tp_mode == "blockwise"
    if slabs:
        grid = data_parallel_only(grid, buffers.data)
    split_of = functools.partial(sharding.split_of, base.optimizer)
    members = grid
    shards = agreed_in(
        grid.ranks.group,
        lambda: {
            param: zero1.fragment_of(param, place, split_of, members, slabs=slabs)
            for param, place in places.items()
        },
    )
    # with owners, a rank sends and receives its share of a matrix twice, however many ranks
    settings = sharding.settings
    overlaps = settings.overlaps_step and base.name == "muon"
    means = Means(
        "exchange",
        wave_mb=settings.wave_mb,
        device=torch.device("cuda", torch.cuda.current_device()),
        team_size=settings.team_size,
        windows=windows_of(list(shards), sharding.chunks) if overlaps else (),
    )
    return driver_over(base, groups, shards, means, config)


def _numbered(stepper: Stepper, params: Mapping[Driver, Sequence[Tensor]]) -> Stepper:
    """Return a stepper whose drivers know the shard number of each fragment.

    ``params`` has the parameters of drivers with shards, in order of the shards. Other drivers
    number their fragments in order of the groups.
    """
    model_of = {id(item.main): item.param for item in stepper.storage.stored()}
    found = []
    for driver in stepper.drivers:
        held = [[model_of[id(p)] for p in group["params"]] for group in stepper.groups_of(driver)]
        mine = params.get(driver) or [param for group in held for param in group]
        number_of = {param: number for number, param in enumerate(mine)}
        driver.attach([[number_of[param] for param in group] for group in held])
        found.append(mine)
    return replace(stepper, params=found)


def _groups_in(base: Base, places: Mapping[Tensor, Any], *, is_expert: bool) -> list[ParamGroup]:
    """Return an optimizer's groups with the parameters of one set of buffers.

    Empty groups are kept, because other pipeline stages may have parameters in them.
    """
    groups = []
    for group in base.groups:
        members = [param for param in group["params"] if param in places]
        trained = [param for param in group["params"] if param.requires_grad]
        if members or (not trained and bool(group.get("is_expert_parallel")) == is_expert):
            name = type(base.optimizer).__name__.lower()
            groups.append({"optimizer": name, **group, "params": members})
    return groups
