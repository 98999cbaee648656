"""Builds one optimizer of some parameters, wherever their shards are."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Protocol

from torch import Tensor

from megatron_eopt.base.agreement import raise_together
from megatron_eopt.config.arguments import arguments_of
from megatron_eopt.config.settings import Settings
from megatron_eopt.optimizers.element_wise import ElementWiseRule
from megatron_eopt.optimizers.exchange import ExchangeConfig
from megatron_eopt.optimizers.sharded_optimizer import ShardedOptimizer
from megatron_eopt.optimizers.specs import OptimizerSpec, optimizer_specs, update_rule_over
from megatron_eopt.optimizers.update_rule import ParamGroup, UpdateRule
from megatron_eopt.routing.model import Routing
from megatron_eopt.routing.parameters import check_dtypes
from megatron_eopt.storage.shard import ParamShard

type OptimizerClass = Callable[..., ShardedOptimizer]
"""A ShardedOptimizer, or what returns one for the same arguments."""


class ShardSource(Protocol):
    """Knows which ranks store which parts of parameters."""

    def kind_of(self, param: Tensor) -> Hashable:
        """Return what parameters of one update rule have in common; collective."""

    def shards(
        self, spec: OptimizerSpec, params: Mapping[str, Tensor]
    ) -> tuple[list[ParamShard], ExchangeConfig]:
        """Return the shards of parameters of one kind, and how they are exchanged; collective.

        If it raises an error, it does so on all ranks that store them.
        """


def build_over(
    specs: Sequence[OptimizerSpec],
    names: Mapping[Tensor, str],
    source: ShardSource,
    config: Any,
    cls: OptimizerClass = ShardedOptimizer,
) -> ShardedOptimizer:
    """Build one optimizer with the groups of some optimizers; collective.

    Args:
        specs: The optimizers, each with its groups.
        names: The names of their parameters and maybe of others, in an order that all ranks which
            store a parameter share.
        source: Says where matrices are stored.
        config: The configuration.
        cls: Class of the result.
    """
    groups: list[ParamGroup] = []
    served: list[tuple[UpdateRule, slice]] = []
    order = {param: number for number, param in enumerate(names)}
    for spec in specs:
        places = slice(len(groups), len(groups) + len(spec.groups))
        groups += spec.groups
        params = [param for group in spec.groups for param in group["params"]]
        # ranks create process groups and exchange shards parameter by parameter
        params.sort(key=order.__getitem__)
        for rule in _rules(spec, {param: names[param] for param in params}, source, config):
            rule.is_clipped = spec.is_clipped
            served.append((rule, places))
    return cls(groups, served, names)


def _rules(
    spec: OptimizerSpec, names: Mapping[Tensor, str], source: ShardSource, config: Any
) -> Iterator[UpdateRule]:
    """Yield what updates the parameters of one optimizer."""
    # a pipeline stage may have no matrices
    if spec.layout == "element_wise" or not names:
        yield element_wise_rule(spec, names, config)
        return
    together: dict[Hashable, dict[str, Tensor]] = {}
    for param, name in names.items():
        together.setdefault(source.kind_of(param), {})[name] = param
    for members in together.values():
        yield update_rule_over(spec, *source.shards(spec, members), config)


def element_wise_rule(
    spec: OptimizerSpec, names: Mapping[Tensor, str], config: Any
) -> ElementWiseRule:
    """Return what updates parameters, given with their names, element by element."""
    shards = [ParamShard(name, param) for param, name in names.items()]
    return ElementWiseRule(spec.optimizer, spec.init_state_fn, config, shards)


def build_routed(
    settings: Settings, routing: Routing, source: ShardSource, cls: OptimizerClass
) -> ShardedOptimizer:
    """Build the optimizer, an instance of ``cls``, of routed parameters; collective.

    Its groups have rates, in case no scheduler sets them. ``source`` says where they are stored.
    """
    # all ranks raise together; otherwise the others would wait in a collective
    specs = raise_together(lambda: _checked(settings, routing))
    rated = [
        replace(spec, groups=[{**group, **_rates(settings, group)} for group in spec.groups])
        for spec in specs
    ]
    return build_over(rated, routing.names, source, settings.config, cls)


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
    """Return the initial learning rate and weight decay."""
    decay = group.get("start_wd", settings.config.weight_decay)
    return {"lr": group.get("max_lr", settings.config.lr), "weight_decay": decay * group["wd_mult"]}
