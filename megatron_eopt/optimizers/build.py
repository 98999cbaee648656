"""Builds one optimizer of routed parameters, wherever their shards are."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

from torch import Tensor

from megatron_eopt.base.agreement import raise_together, raise_together_in
from megatron_eopt.base.names import TpModeT
from megatron_eopt.base.place import whole_shape
from megatron_eopt.config.arguments import arguments_of
from megatron_eopt.config.settings import Settings
from megatron_eopt.layouts import Layout
from megatron_eopt.matrices import Split, whole
from megatron_eopt.optimizers.element_wise import ElementWiseRule
from megatron_eopt.optimizers.exchange import ExchangeConfig
from megatron_eopt.optimizers.modes import place_matrices
from megatron_eopt.optimizers.sharded_optimizer import ShardedOptimizer
from megatron_eopt.optimizers.specs import OptimizerSpec, optimizer_specs, update_rule_over
from megatron_eopt.optimizers.update_rule import ParamGroup, UpdateRule
from megatron_eopt.routing.model import Routing
from megatron_eopt.routing.parameters import check_dtypes
from megatron_eopt.storage.local_tensors import local_of
from megatron_eopt.storage.shard import ParamShard

type ComputedBy = Callable[[Sequence[Layout]], Sequence[int]]
"""Returns a rank that computes each of some matrices."""


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
    source: ShardSource,
    cls: Callable[..., ShardedOptimizer],
) -> ShardedOptimizer:
    """Build the optimizer, an instance of ``cls``, of routed parameters; collective.

    ``source`` says where they are stored.
    """
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
    return cls(groups, served, routing.names)


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
