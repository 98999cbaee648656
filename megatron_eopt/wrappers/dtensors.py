"""Build one torch optimizer for sharded parameters: DTensors of any framework, or parts of tensors.

For Megatron's training loop, it is put into one of megatron-core's wrappers and into a chain, which
prepares and clips gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Protocol

from megatron.core.distributed import TorchFullyShardedDataParallel
from torch import Tensor

from megatron_eopt.base.agreement import raise_together, raise_together_in
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import TpModeT
from megatron_eopt.base.place import whole_shape
from megatron_eopt.config.checks import refuse_for_dtensors
from megatron_eopt.config.settings import Settings, resolve
from megatron_eopt.config.values import read_config
from megatron_eopt.layouts import Layout
from megatron_eopt.matrices import Split, whole
from megatron_eopt.optimizers.chain_link import ChainLink
from megatron_eopt.optimizers.continuation import Policy
from megatron_eopt.optimizers.dtensor_optimizer import DTensorOptimizer
from megatron_eopt.optimizers.element_wise import ElementWiseRule
from megatron_eopt.optimizers.engine import EngineConfig
from megatron_eopt.optimizers.modes import plan_work
from megatron_eopt.optimizers.update_rule import ParamGroup, UpdateRule
from megatron_eopt.routing.model import Routing
from megatron_eopt.routing.parameters import check_dtypes
from megatron_eopt.storage import dtensors
from megatron_eopt.storage.interface import Storage
from megatron_eopt.storage.shard import Shard
from megatron_eopt.wrappers.builders import OptimizerBuildContext
from megatron_eopt.wrappers.chain import OptimizerChain
from megatron_eopt.wrappers.specs import OptimizerSpec, optimizer_specs, update_rule_over


def resolve_for_dtensors(config: Any, *, own_loop: bool = False) -> Settings:
    """Return the settings of a configuration for DTensors; raises if a value is not supported.

    ``own_loop`` says that the caller has its own training loop instead of Megatron's.
    """
    refuse_for_dtensors(read_config(config), own_loop=own_loop)
    settings = replace(resolve(config), of_dtensors=True, own_loop=own_loop)
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
        computed_by: dtensors.ComputedBy,
    ) -> list[Shard]:
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
    source = source or dtensors.DTensorShards()
    groups: list[ParamGroup] = []
    served: list[tuple[UpdateRule, slice, list[Tensor]]] = []
    order = {param: number for number, param in enumerate(routing.names)}
    # all ranks raise together; otherwise the others would wait in a collective
    specs = raise_together(lambda: _checked(settings, routing))
    for spec in specs:
        places = slice(len(groups), len(groups) + len(spec.groups))
        groups += [{**group, **_rates(settings, group)} for group in spec.groups]
        params = [param for group in spec.groups for param in group["params"]]
        params.sort(key=order.__getitem__)
        if spec.layout == "element_wise":
            single = ElementWiseRule(spec.optimizer, spec.init_state_fn, settings.config)
            single.is_clipped = spec.is_clipped
            served.append((single, places, params))
            continue
        # one update rule per process group, with sharded and replicated parameters apart
        together: dict[tuple[Any, bool], list[Tensor]] = {}
        for param in params:
            together.setdefault((source.group_of(param), source.is_cut(param)), []).append(param)
        for members in together.values():
            update_rule = _matrix_update_rule(spec, settings, routing, members, source)
            update_rule.is_clipped = spec.is_clipped
            served.append((update_rule, places, members))
    optimizer = cls(groups, served, routing.names)
    optimizer.policy = Policy.of(settings)
    return optimizer


def _checked(settings: Settings, routing: Routing) -> list[OptimizerSpec]:
    """Create the optimizers; raise if one cannot step the dtype of a parameter."""
    # here the parameters, not the model's configuration, say how fused weights are split
    chunks = [SimpleNamespace(config=None)]
    specs = optimizer_specs(settings, routing, chunks, None, stand_ins=True, plain=True)
    for spec in specs:
        if spec.layout == "matrix_state":
            mine = [param for group in spec.groups for param in group["params"]]
            check_dtypes({param: routing.names[param] for param in mine}, spec.name)
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
    engine_config = EngineConfig(
        mode,
        matrix_buffer_mb=settings.config.matrix_buffer_mb,
        device=dtensors.local_of(params[0]).device,
    )
    size = 1 if group is None else group.size()

    def computed_by(layouts: Sequence[Layout]) -> list[int]:
        work = plan_work(layouts, size, mode, engine_config.wave_bytes)
        return [int(matrix.compute.boxes.rank[0]) for matrix in work.matrices]

    named = {routing.names[param]: param for param in params}
    splits = [routing.matrices[param] or whole(whole_shape(param)) for param in params]
    found = raise_together_in(group, lambda: source.shards(named, splits, group, computed_by))
    return update_rule_over(
        spec, spec.groups, dict(zip(params, found, strict=True)), engine_config, settings.config
    )


def is_torch_fsdp2(model_chunks: Sequence[Any]) -> bool:
    """Return whether megatron-core's wrapper of torch's ``fully_shard`` manages the model."""
    return any(isinstance(chunk, TorchFullyShardedDataParallel) for chunk in model_chunks)


def build_torch_fsdp2(context: OptimizerBuildContext) -> OptimizerChain | None:
    """Return the chain for a ``fully_shard`` model; its one optimizer steps all DTensors."""
    settings, routing = context.settings, context.routing
    if settings.is_standard or not is_torch_fsdp2(context.model_chunks):
        return None
    dtensors.check_parameters([route.parameter for route in routing.routes])
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
        storage = dtensors.MainShards(inner, config, scaler, state_exists)
        inner.follow({item.param: item.main for item in storage.main_shards()})
    else:
        storage = dtensors.Float32Shards(inner, config, state_exists)
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
    inner = storage.optimizer
    params = [inner.params_of(update_rule) for update_rule in inner.update_rules]
    link = ChainLink(storage, inner.update_rules, params)
    return cls([link], context.settings, scaler, context.model_chunks)


def state_exists(*_: Any) -> None:
    """Do nothing, because a ``DTensorOptimizer`` creates its state in the constructor."""
