"""DTensors of any framework: which ranks hold which shards, and one optimizer for all of them."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor

from megatron_eopt.base.agreement import gather_objects, group_of_members, raise_together_in
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import Int64Array, TpModeT
from megatron_eopt.base.place import refuse_part, whole_shape
from megatron_eopt.config.checks import refuse_for_dtensors
from megatron_eopt.config.settings import Settings
from megatron_eopt.fsdp2.optimizer import DTensorOptimizer
from megatron_eopt.layouts import Layout, dtensor_layout
from megatron_eopt.matrices import Split, whole
from megatron_eopt.optimizers.build import build_routed
from megatron_eopt.optimizers.exchange import ExchangeConfig
from megatron_eopt.optimizers.modes import place_matrices
from megatron_eopt.optimizers.specs import OptimizerSpec
from megatron_eopt.routing.model import Routing
from megatron_eopt.routing.splits import tensor_parallel_cut
from megatron_eopt.storage.local_tensors import local_of
from megatron_eopt.storage.shard import ParamShard, Ranks, box_layouts
from megatron_eopt.storage.uneven import uneven_kind


class DTensorShards:
    """Finds out which ranks store which parts of DTensors; a whole tensor is this rank's own."""

    def __init__(self, settings: Settings, matrices: Mapping[Tensor, Split | None]) -> None:
        self._settings, self._matrices = settings, matrices
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def kind_of(self, param: Tensor) -> Hashable:
        """Return the ranks that store a part of ``param``, and whether none stores all of it."""
        return self._group_of(param), _is_cut(param)

    def shards(
        self, spec: OptimizerSpec, params: Mapping[str, Tensor]
    ) -> tuple[list[ParamShard], ExchangeConfig]:
        """Return the shards of some parameters, and how they are exchanged.

        Of several replicas, the one that includes the rank which computes a matrix is the source,
        because that rank has a part of it already.
        """
        first = next(iter(params.values()))
        group, is_cut = self._group_of(first), _is_cut(first)
        mode: TpModeT = self._settings.first_field("tp_mode") or "auto"
        if spec.layout == "matrix_state" or (mode == "auto" and is_cut):
            # sharded matrices must be sent anyway, and one owner does the work only once
            mode = "exchange"
        buffer_mb = self._settings.config.matrix_buffer_mb
        config = ExchangeConfig(mode, buffer_mb, device=local_of(first).device)
        size = 1 if group is None else group.size()

        def computed_by(layouts: Sequence[Layout]) -> list[int]:
            placements, _ = place_matrices(layouts, size, config.mode, config.wave_bytes)
            return [int(placement.compute.boxes.rank[0]) for placement in placements]

        splits = [self._matrices[p] or whole(whole_shape(p)) for p in params.values()]
        shards = raise_together_in(group, lambda: _shards(params, splits, group, computed_by))
        return shards, config

    def _group_of(self, param: Tensor) -> dist.ProcessGroup | None:
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


def _is_cut(param: Tensor) -> bool:
    """Return whether no rank stores the whole parameter."""
    if not isinstance(param, DTensor):
        return False
    extents = zip(param.placements, param.device_mesh.shape, strict=True)
    return any(size > 1 and not placement.is_replicate() for placement, size in extents)


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
    computed_by: Callable[[Sequence[Layout]], Sequence[int]],
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

    Ranks communicate only if a kind of DTensors asks for it; others follow from placements.
    """
    sizes = [local_of(param).numel() for param in params]
    kinds = map(uneven_kind, params)
    asks = group is not None and any(kind is not None and kind.asks_sizes for kind in kinds)
    of_ranks = gather_objects(sizes, group) if asks else [sizes]
    return np.array(of_ranks, np.int64).reshape(-1, len(sizes))


def _layouts(
    name: str, param: Tensor, split: Split, group: dist.ProcessGroup | None, sizes: Int64Array
) -> tuple[Layout, ...]:
    """Return the layouts of a parameter's logical matrices."""
    cols = split.cols
    if group is None or not isinstance(param, DTensor):
        layout = Layout.whole((param.numel() // cols, cols), 0)
    elif (kind := uneven_kind(param)) is not None:
        return kind.layouts(name, param, split, _mesh_in(param, group), sizes)
    else:
        mesh, shape = _mesh_in(param, group), tuple(param.shape)
        layout = dtensor_layout(shape, mesh, param.placements, cols=cols, name=name)
    return box_layouts(split, layout)


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


def build_dtensors(
    settings: Settings,
    routing: Routing,
    cls: Callable[..., DTensorOptimizer] = DTensorOptimizer,
) -> Any:
    """Build the optimizer, an instance of ``cls``, of DTensors or whole tensors; collective."""
    return build_routed(settings, routing, DTensorShards(settings, routing.matrices), cls)
