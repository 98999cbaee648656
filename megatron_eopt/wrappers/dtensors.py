"""DTensors of any framework: which ranks hold which shards, and one optimizer for all of them.

Megatron-FSDP gives each rank any number of rows of a tensor-parallel shard. In a fused weight such
a shard has a part of every logical matrix, so what a rank holds is a flat fragment of it, as in
Megatron's buffers, not a box of the whole weight. All other DTensors are boxes.

For Megatron's training loop, the optimizer is put into one of megatron-core's wrappers and into a
chain, which prepares and clips gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist
from megatron.core.distributed import TorchFullyShardedDataParallel
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor

from megatron_eopt.base.agreement import (
    gather_objects,
    group_of_members,
    raise_together,
    raise_together_in,
)
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import Int64Array, TpModeT
from megatron_eopt.base.place import refuse_part, whole_shape
from megatron_eopt.checkpoint.dtensor_optimizer import DTensorOptimizer
from megatron_eopt.config.arguments import arguments_of
from megatron_eopt.config.checks import refuse_for_dtensors
from megatron_eopt.config.settings import Settings
from megatron_eopt.layouts import Layout, dtensor_layout
from megatron_eopt.matrices import Split, whole
from megatron_eopt.optimizers.element_wise import ElementWiseRule
from megatron_eopt.optimizers.exchange import ExchangeConfig
from megatron_eopt.optimizers.modes import place_matrices
from megatron_eopt.optimizers.storage import Storage
from megatron_eopt.optimizers.update_rule import ParamGroup, UpdateRule
from megatron_eopt.routing.model import Routing
from megatron_eopt.routing.parameters import check_dtypes
from megatron_eopt.routing.splits import tensor_parallel_cut
from megatron_eopt.storage.local_tensors import is_in_a_bucket, local_of
from megatron_eopt.storage.shard import (
    Fragment,
    ParamShard,
    Ranks,
    box_layouts,
    fragment_layouts,
)
from megatron_eopt.storage.units import layout_in_unit, unit_of
from megatron_eopt.wrappers.builders import OptimizerBuildContext
from megatron_eopt.wrappers.chain import OptimizerChain
from megatron_eopt.wrappers.off_loading import off_load
from megatron_eopt.wrappers.replicated import Float32Optimizer, MainParamsOptimizer
from megatron_eopt.wrappers.specs import OptimizerSpec, optimizer_specs, update_rule_over

type ComputedBy = Callable[[Sequence[Layout]], Sequence[int]]
"""Returns a rank that computes each of some matrices."""


class DTensorShards:
    """Finds out which ranks store which parts of DTensors; a whole tensor is this rank's own."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def group_of(self, param: Tensor) -> dist.ProcessGroup | None:
        """Return the group of all ranks that store a part of ``param``; None for one rank.

        Meshes of several dimensions (HSDP, tensor parallelism) have one torch group per dimension
        only, so the group may be created here. All ranks of a mesh must call this in the same
        order.
        """
        if not isinstance(param, DTensor) or param.device_mesh.size() == 1:
            return None
        mesh = param.device_mesh
        # by ranks, not by mesh: several meshes of the same ranks share one group
        ranks = tuple(sorted(_ranks_in(param).ravel().tolist()))
        if ranks not in self._made:
            self._made[ranks] = mesh.get_group() if mesh.ndim == 1 else group_of_members(ranks)
        return self._made[ranks]

    def is_cut(self, param: Tensor) -> bool:
        """Return whether no rank stores the whole parameter."""
        if not isinstance(param, DTensor):
            return False
        extents = zip(param.placements, param.device_mesh.shape, strict=True)
        return any(size > 1 and not placement.is_replicate() for placement, size in extents)

    def shards(
        self,
        params: Mapping[str, Tensor],
        splits: Sequence[Split],
        group: dist.ProcessGroup | None,
        computed_by: ComputedBy,
    ) -> list[ParamShard]:
        """Return the shards of some parameters; collective over their :meth:`group_of`.

        Of several replicas, the one that includes the rank which computes a matrix is the source,
        because that rank has a part of it already.
        """
        return _shards(params, splits, group, computed_by)


def _ranks_in(param: DTensor) -> Int64Array:
    """Return the global ranks of a mesh, in its shape; real values even for fake tensors."""
    with unset_fake_temporarily():
        return param.device_mesh.mesh.numpy()  # type: ignore[no-any-return]


def _mesh_in(param: DTensor, group: dist.ProcessGroup) -> Int64Array:
    """Return a parameter's device mesh in ranks of a group that contains it."""
    number = {rank: i for i, rank in enumerate(dist.get_process_group_ranks(group))}
    ranks = _ranks_in(param)
    numbers = [number[rank] for rank in ranks.ravel().tolist()]
    return np.array(numbers, np.int64).reshape(ranks.shape)


def _shards(
    params: Mapping[str, Tensor],
    splits: Sequence[Split],
    group: dist.ProcessGroup | None,
    computed_by: ComputedBy,
) -> list[ParamShard]:
    sizes = _held_by_all(list(params.values()), group)
    layouts = [
        _layouts(name, param, split, group, sizes[:, number])
        for number, ((name, param), split) in enumerate(zip(params.items(), splits, strict=True))
    ]
    if group is not None:
        # computed from the layouts, so all ranks find the same owners without communication
        owners = iter(computed_by([layout for of_param in layouts for layout in of_param]))
        layouts = [
            tuple(
                layout.with_sources(_replica_of(next(owners), param, group)) for layout in of_param
            )
            for of_param, param in zip(layouts, params.values(), strict=True)
        ]
    return [
        ParamShard(name, param, split, of_param, Ranks.of(group), tuple(local_of(param).shape))
        for (name, param), split, of_param in zip(params.items(), splits, layouts, strict=True)
    ]


def _held_by_all(params: Sequence[Tensor], group: dist.ProcessGroup | None) -> Int64Array:
    """Return the number of elements of each parameter on each rank, ``(ranks, parameters)``.

    Ranks communicate only if Megatron-FSDP's first version shards a parameter; other layouts follow
    from placements, or from what each rank knows of a unit.
    """
    sizes = [local_of(param).numel() for param in params]
    asks = group is not None and any(map(is_in_a_bucket, params))
    of_ranks = gather_objects(sizes, group) if asks else [sizes]
    return np.array(of_ranks, np.int64).reshape(-1, len(sizes))


def _layouts(
    name: str, param: Tensor, split: Split, group: dist.ProcessGroup | None, sizes: Int64Array
) -> tuple[Layout, ...]:
    """Return the layouts of a parameter's logical matrices."""
    cols = split.cols
    if group is None or not isinstance(param, DTensor):
        layout = Layout.whole((param.numel() // cols, cols), 0)
    elif is_in_a_bucket(param):
        return _fragments(param, split, _mesh_in(param, group), sizes)
    elif unit_of(param) is not None:
        layout = layout_in_unit(param, _mesh_in(param, group), cols, name)
    else:
        mesh, shape = _mesh_in(param, group), tuple(param.shape)
        layout = dtensor_layout(shape, mesh, param.placements, cols=cols, name=name)
    return box_layouts(split, layout)


def _fragments(
    param: DTensor, split: Split, mesh: Int64Array, sizes: Int64Array
) -> tuple[Layout, ...]:
    """Return the layouts of a Megatron-FSDP parameter, given how many elements each rank has."""
    index = param.megatron_fsdp_dist_index  # type: ignore[attr-defined]
    dims = list(param.device_mesh.mesh_dim_names or ())
    # along this dimension, ranks have consecutive ranges; all others have copies or other slabs
    of_data, stops = dims.index(index.dp_shard_dim), sizes[mesh]
    starts = np.zeros_like(stops)
    if not param.placements[of_data].is_replicate():
        stops = np.cumsum(stops, axis=of_data)
        starts = stops - sizes[mesh]
    slabs, cut, size = np.zeros_like(mesh), -1, 1
    if index.tp_dim in dims:
        of_tensor = dims.index(index.tp_dim)
        slabs, size = np.indices(mesh.shape)[of_tensor], mesh.shape[of_tensor]
        cut = param.placements[of_tensor].dim  # type: ignore[attr-defined]
    # fragments are listed by rank in the group, but the mesh may have another order
    order = np.argsort(mesh.ravel())
    table = np.stack([slabs.ravel(), starts.ravel(), stops.ravel()], axis=1)[order]
    return fragment_layouts(split, cut, size, [Fragment(*row) for row in table.tolist()])


def _replica_of(rank: int, param: Tensor, group: dist.ProcessGroup) -> list[int]:
    """Return the ranks of the replica, a whole copy, that includes ``rank``."""
    assert isinstance(param, DTensor)
    mesh = _mesh_in(param, group)
    place = np.argwhere(mesh == rank)[0]
    # one index where the mesh holds copies, all indices where it holds parts
    copy = tuple(
        int(i) if placement.is_replicate() else slice(None)
        for i, placement in zip(place, param.placements, strict=True)
    )
    return np.atleast_1d(mesh[copy]).ravel().tolist()  # type: ignore[no-any-return]


def check_parameters(names: Mapping[Tensor, str]) -> None:
    """Raise for the first parameter that ranks would step differently, or not at all.

    Raises:
        ConfigurationError: If a parameter is on the meta device, a plain tensor among DTensors, or
            tensor-parallel outside its device mesh.
    """
    sharded = any(isinstance(param, DTensor) for param in names)
    for param, name in names.items():
        if param.device.type == "meta":
            hint = "Call model.to_empty(device=...), initialize it, then build the optimizer"
            raise ConfigurationError(name, "meta device", "has no storage yet", hint)
        refuse_part(param, name)
        if sharded and not isinstance(param, DTensor):
            rule = "is a plain tensor among DTensors, so its gradient is not averaged over ranks"
            hint = "Let fully_shard manage it, or freeze it"
            raise ConfigurationError(name, tuple(param.shape), rule, hint)
        ranks, dim = tensor_parallel_cut(param) if sharded else (1, -1)
        if ranks > 1:
            rule = f"its mesh lacks the {ranks} tensor-parallel ranks that cut dimension {dim}"
            hint = "Call parallelize_module and fully_shard with submeshes of one device mesh"
            raise ConfigurationError(name, tuple(param.shape), rule, hint)


class LocalShards:
    """Steps shards of DTensors; a mixin for wrappers of whole parameters."""

    def replica_of_matrix(self, param: Tensor, replica: Any) -> tuple[int, ...]:
        """Return the same on all ranks, because there are no copies of such state."""
        return (0, 0, 0)


class Float32Shards(LocalShards, Float32Optimizer):
    """For float32: steps the parameters' shards themselves."""


class MainShards(LocalShards, MainParamsOptimizer):
    """For bf16: steps float32 copies of the shards."""


def settings_for_dtensors(settings: Settings, *, own_loop: bool = False) -> Settings:
    """Return settings for DTensors; raises a ConfigurationError if a value is not supported.

    ``own_loop`` says that the caller has its own training loop instead of Megatron's.
    """
    refuse_for_dtensors(settings.config, own_loop=own_loop)
    settings = replace(settings, of_dtensors=True, own_loop=own_loop)
    if settings.first_field("skip_grad_clip"):
        rule = "is not supported: all sharded parameters are in one optimizer"
        hint = "Set it to False, or clip only the other parameters' gradients in your own loop"
        raise ConfigurationError("muon_skip_grad_clip", True, rule, hint)
    if settings.first_field("tp_mode") == "blockwise":
        rule = "would orthogonalize the rows of each rank separately, which changes the update"
        hint = "Use 'auto', the default of EmergingOptimizerConfig"
        raise ConfigurationError("muon_tp_mode", "blockwise", rule, hint)
    return settings


class ShardSource(Protocol):
    """Knows which ranks store which parts of parameters."""

    def group_of(self, param: Tensor) -> Any:
        """Return the ranks that store a part of ``param``; None for this rank alone."""

    def is_cut(self, param: Tensor) -> bool:
        """Return whether no rank stores the whole parameter."""

    def shards(
        self,
        params: Mapping[str, Tensor],
        splits: Sequence[Split],
        group: Any,
        computed_by: ComputedBy,
    ) -> list[ParamShard]:
        """Return the shards of some parameters; collective over their group."""


def build_routed(
    settings: Settings,
    routing: Routing,
    cls: Callable[..., DTensorOptimizer] = DTensorOptimizer,
    source: ShardSource | None = None,
) -> DTensorOptimizer:
    """Build the optimizer, an instance of ``cls``, of routed parameters; collective.

    ``source`` says where they are stored; by default they are DTensors.
    """
    source = source or DTensorShards()
    groups: list[ParamGroup] = []
    served: list[tuple[UpdateRule, slice]] = []
    order = {param: number for number, param in enumerate(routing.names)}
    # all ranks raise together; otherwise the others would wait in a collective
    specs = raise_together(lambda: _checked(settings, routing))
    for spec in specs:
        places = slice(len(groups), len(groups) + len(spec.groups))
        groups += [{**group, **_rates(settings, group)} for group in spec.groups]
        params = [param for group in spec.groups for param in group["params"]]
        # in model order, because ranks create groups and exchange shards parameter by parameter
        params.sort(key=order.__getitem__)
        if spec.layout == "element_wise":
            shards = [ParamShard(routing.names[param], param) for param in params]
            single = ElementWiseRule(spec.optimizer, spec.init_state_fn, settings.config, shards)
            single.is_clipped = spec.is_clipped
            served.append((single, places))
            continue
        # one update rule per process group, with sharded and replicated parameters apart
        together: dict[tuple[Any, bool], list[Tensor]] = {}
        for param in params:
            together.setdefault((source.group_of(param), source.is_cut(param)), []).append(param)
        for members in together.values():
            update_rule = _matrix_update_rule(spec, settings, routing, members, source)
            update_rule.is_clipped = spec.is_clipped
            served.append((update_rule, places))
    optimizer = cls(groups, served, routing.names)
    return optimizer


def _checked(settings: Settings, routing: Routing) -> list[OptimizerSpec]:
    """Create the optimizers; raise if one cannot step the dtype of a parameter."""
    # here the parameters, not the model's configuration, say how fused weights are split
    chunks = [SimpleNamespace(config=None)]
    arguments = arguments_of(routing.optimizers, settings, chunks, None)
    specs = optimizer_specs(settings, routing, arguments, stand_ins=True, plain=True)
    for spec in specs:
        if spec.layout == "matrix_state":
            params = [param for group in spec.groups for param in group["params"]]
            check_dtypes({param: routing.names[param] for param in params}, spec.name)
    return specs


def _rates(settings: Settings, group: ParamGroup) -> ParamGroup:
    """Return the initial learning rate and weight decay, in case no scheduler sets them."""
    decay = group.get("start_wd", settings.config.weight_decay)
    return {"lr": group.get("max_lr", settings.config.lr), "weight_decay": decay * group["wd_mult"]}


def _matrix_update_rule(
    spec: OptimizerSpec,
    settings: Settings,
    routing: Routing,
    params: Sequence[Tensor],
    source: ShardSource,
) -> UpdateRule:
    mode: TpModeT = settings.first_field("tp_mode") or "auto"
    group = source.group_of(params[0])
    if spec.layout == "matrix_state" or (mode == "auto" and source.is_cut(params[0])):
        # sharded matrices must be sent anyway, and one owner does the work only once
        mode = "exchange"
    exchange_config = ExchangeConfig(
        mode,
        matrix_buffer_mb=settings.config.matrix_buffer_mb,
        device=local_of(params[0]).device,
    )
    size = 1 if group is None else group.size()

    def computed_by(layouts: Sequence[Layout]) -> list[int]:
        placements, _ = place_matrices(layouts, size, mode, exchange_config.wave_bytes)
        return [int(placement.compute.boxes.rank[0]) for placement in placements]

    named = {routing.names[param]: param for param in params}
    splits = [routing.matrices[param] or whole(whole_shape(param)) for param in params]
    shards = raise_together_in(group, lambda: source.shards(named, splits, group, computed_by))
    return update_rule_over(spec, shards, exchange_config, settings.config)


def is_torch_fsdp2(model_chunks: Sequence[Any]) -> bool:
    """Return whether megatron-core's wrapper of torch's ``fully_shard`` manages the model."""
    return any(isinstance(chunk, TorchFullyShardedDataParallel) for chunk in model_chunks)


def build_torch_fsdp2(context: OptimizerBuildContext) -> OptimizerChain | None:
    """Return the chain for a ``fully_shard`` model; its one optimizer steps all DTensors."""
    settings, routing = context.settings, context.routing
    if not is_torch_fsdp2(context.model_chunks):
        return None
    check_parameters(routing.names)
    what = "torch's FSDP2 under Megatron"
    raise_together(lambda: check_dtypes(routing.names, what, double=not settings.half))
    inner = build_routed(settings, routing)
    return chain_of_shards(inner, context, context.collection.mp, context.collection)


def chain_of_shards(
    inner: DTensorOptimizer,
    context: OptimizerBuildContext,
    norm_group: Any,
    collection: Any,
    scaler: Any = None,
) -> OptimizerChain:
    """Return the chain of :func:`build_routed`'s result, with float32 main weights if needed.

    For ``norm_group`` and ``collection``, see :meth:`Storage.count_in`.
    """
    config = context.settings.config
    storage: Storage
    if context.settings.half:
        storage = MainShards(inner, config, scaler, state_exists)
    else:
        storage = Float32Shards(inner, config, state_exists)
    storage.count_in(norm_group, collection)
    chain = chain_over(storage, context, scaler=scaler)
    # not all state is loaded in place, so the trainer must call load_state_dict
    chain.loads_itself = True
    return chain


def chain_over(
    storage: Storage,
    context: OptimizerBuildContext,
    cls: type[OptimizerChain] = OptimizerChain,
    scaler: Any = None,
) -> OptimizerChain:
    """Return the chain, an instance of ``cls``, of a storage over :func:`build_routed`'s result."""
    storage.serve(storage.optimizer.assigned)
    off_load(storage.optimizer, context.settings)
    return cls([storage], context.settings, scaler, context.model_chunks)


def state_exists(*_: Any) -> None:
    """Do nothing, because a ``DTensorOptimizer`` creates its state in the constructor."""
