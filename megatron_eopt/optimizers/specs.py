"""Create the torch optimizers of a configuration, and the update rules that step them."""

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import SCALAR_OPTIMIZERS, STEP
from megatron_eopt.config.arguments import constructed
from megatron_eopt.config.fields import constructor_parameters
from megatron_eopt.config.registry import (
    StateLayoutT,
    arguments_cls_of,
    entry_of,
    looks_ahead,
    state_layout_of,
    steps_in_pieces,
)
from megatron_eopt.config.settings import Settings
from megatron_eopt.optimizers.exchange import ExchangeConfig
from megatron_eopt.optimizers.overrides import own_arguments
from megatron_eopt.optimizers.scalar import (
    FusedClasses,
    build_scalar_optimizer,
    is_element_wise,
    scalar_init_of,
)
from megatron_eopt.optimizers.update_rule import InitState, ParamGroup, UpdateRule, step_inside
from megatron_eopt.optimizers.whole_matrix_rule import WholeMatrixRule
from megatron_eopt.routing.groups import Group, param_group
from megatron_eopt.routing.model import Routing
from megatron_eopt.storage.shard import ParamShard

type Construct = Callable[[Sequence[ParamGroup]], torch.optim.Optimizer]


@dataclass(frozen=True)
class OptimizerSpec:
    """A torch optimizer from a user or a configuration, with the parameters that it steps."""

    optimizer: Any  # the torch optimizer, maybe over placeholder parameters; None if none is needed
    init_state_fn: InitState  # creates its state, called as ``(optimizer, config)``
    groups: Sequence[ParamGroup]  # parameter groups of the model's parameters
    is_clipped: bool = True  # whether its gradients are clipped
    construct: Construct | None = None  # creates the same optimizer over other groups
    name: str = ""  # its name in the configuration
    is_expert: bool = False  # whether it steps expert parameters

    @property
    def looks_ahead(self) -> bool:
        """Whether its updates can be computed before the gradient norm is known."""
        return self.layout == "matrix_update" and looks_ahead(type(self.optimizer))

    @property
    def layout(self) -> StateLayoutT:
        """Whether its update or state needs whole matrices; both, if its class is not known."""
        cls = type(self.optimizer)
        if steps_in_pieces(cls):
            return "matrix_update"
        if getattr(self.optimizer, "frob_normalize", False):
            # with this option, LaProp scales by norms of whole parameters
            return "matrix_state"
        return "element_wise" if is_element_wise(cls) else "matrix_state"


def optimizer_specs(
    settings: Settings,
    routing: Routing,
    arguments: Mapping[str, dict[str, Any]],
    *,
    stand_ins: bool = False,
    plain: bool = False,
    fused: FusedClasses | None = None,
) -> list[OptimizerSpec]:
    """Create the optimizers of a chain: the main one first, dense parameters before experts.

    Checkpoint formats depend on order and number, so both are the same on all ranks.

    Args:
        settings: The configuration.
        routing: Which optimizer each parameter gets.
        arguments: Constructor arguments, as :func:`arguments_of` returns them.
        stand_ins: Whether matrix optimizers get placeholders of shape (1, 1) for the parameters,
            because the storage steps other tensors and knows their logical matrices. Those that
            make update rules always do.
        plain: Whether Adam and SGD get placeholders, too, and are torch's.
        fused: Other classes for Adam and SGD.
    """
    main = settings.optimizer
    rates = {"lr": settings.config.lr, "min_lr": settings.config.min_lr}
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        name: functools.partial(build_scalar_optimizer, name, settings, fused=fused, plain=plain)
        if name in SCALAR_OPTIMIZERS
        else functools.partial(constructed, name, settings.config, arguments[name], for_shards=True)
        for name in sorted(routing.optimizers)
    }
    # groups with settings that only a constructor reads get an optimizer of their own
    kinds: dict[tuple[str, bool, tuple[Any, ...]], list[Group]] = {}
    for group in routing.groups:
        name, values = group.key.optimizer, dict(group.key.values)
        own = own_arguments(name, values, functools.partial(makers[name], _stand_in()))
        kind = (name, group.key.is_expert, tuple(sorted(own.items())))
        kinds.setdefault(kind, []).append(group)
    specs = []
    # values may not be comparable, so only their presence counts; the sort keeps the order of
    # groups, which is the same on all ranks
    for kind in sorted(kinds, key=lambda kind: (kind[0] != main, *kind[:2], bool(kind[2]))):
        (name, is_expert, only), routed = kind, kinds[kind]
        groups = [param_group(g, [r.parameter.param for r in g.routes], **rates) for g in routed]
        made_over = groups
        if name in SCALAR_OPTIMIZERS:
            replaces = plain
        else:
            replaces = stand_ins or state_layout_of(name) == "matrix_update"
        if replaces:
            made_over = [{**group, **_stand_in()[0]} for group in groups]
        own_rates = [group.get("lr") for group in groups]  # torch adds its default to the groups
        construct = functools.partial(makers[name], **dict(only))
        if name not in SCALAR_OPTIMIZERS:
            entry = entry_of(name)
            accepted = constructor_parameters(arguments_cls_of(name))
            if not replaces and "splits" in accepted:
                construct = functools.partial(construct, splits=routing.matrices)
            if "weight_decay" not in accepted:
                # as a scheduler writes it, also to groups of a class with its own value (Scion)
                made_over = [{"weight_decay": settings.config.weight_decay, **g} for g in made_over]
        optimizer = _made(name, construct, made_over)
        if name in SCALAR_OPTIMIZERS:
            init_fn = scalar_init_of(optimizer)
        else:
            init_fn = entry.init_state_fn
            if entry.draws:
                _draw_alike(optimizer)
        if settings.config.lr is None and "max_lr" not in settings.own_rates(name):
            # a scheduler or a checkpoint must set the learning rate before the first step
            optimizer.defaults["lr"] = None
            for made, rate in zip(optimizer.param_groups, own_rates, strict=True):
                made["lr"] = rate
        complete = [
            {**made, "params": given["params"]}
            for made, given in zip(optimizer.param_groups, groups, strict=True)
        ]
        is_clipped = not (name == main and settings.first_field("skip_grad_clip"))
        specs.append(
            OptimizerSpec(optimizer, init_fn, complete, is_clipped, construct, name, is_expert)
        )
    return specs or [OptimizerSpec(None, None, [], name=main)]


def _draw_alike(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer that draws random numbers step its parameters one by one, each seeded.

    The seed depends on shape and step count only. So copies of a parameter draw equal numbers on
    all ranks, at any layout, and in resumed runs. Other random states do not change. This counts
    steps if the class does not (PSGD's count stays 0 in emerging-optimizers 0.3).
    """

    def step_one(param: Tensor) -> None:
        state: dict[str, Any] = optimizer.state[param]
        steps = int(state.get(STEP, 0))
        torch.manual_seed(zlib.crc32(repr((steps, tuple(param.shape))).encode()))
        step_inside(optimizer, as_class=True)
        if state.setdefault(STEP, 0) == steps:
            state[STEP] += 1

    def step_all() -> None:
        groups = list(optimizer.param_groups)
        gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(gpus):
            try:
                for group in groups:
                    stepped: dict[str, Any] = {}
                    for param in group["params"]:
                        if param.grad is not None:
                            stepped = {**group, "params": [param]}
                            optimizer.param_groups = [stepped]
                            step_one(param)
                    # keep what a step writes to its group, such as a step count
                    group |= {**stepped, "params": group["params"]}
            finally:
                optimizer.param_groups = groups

    optimizer.step = step_all  # type: ignore[assignment, method-assign]


def _stand_in() -> list[ParamGroup]:
    """Return a group of one placeholder parameter."""
    return [{"params": [nn.Parameter(torch.ones(1, 1))]}]


def _made(name: str, construct: Construct, groups: Sequence[ParamGroup]) -> torch.optim.Optimizer:
    try:
        return construct(groups)
    except ConfigurationError:
        raise
    except ValueError as error:
        rule = f"cannot start: {error}".rstrip(".")
        hint = "Change its settings, or the initial weights, as this message says"
        raise ConfigurationError("optimizer", name, rule, hint) from error


def fault_in(construct: Construct, weights: Sequence[Tensor]) -> str | None:
    """Return why an optimizer cannot start from whole weights; None if it can, or in a dry run."""
    if any(map(is_fake, weights)):
        return None
    # the constructor may change what it gets, and these are the real weights
    copies = [nn.Parameter(weight.detach().clone()) for weight in weights]
    try:
        construct([{"params": copies}])
    except ValueError as error:
        return str(error).rstrip(".")
    pairs = zip(copies, weights, strict=True)
    same = all(copy.allclose(weight, 0, 0, equal_nan=True) for copy, weight in pairs)
    return None if same else "its constructor changes the weight, but cannot change stored shards"


def update_rule_over(
    spec: OptimizerSpec, shards: Sequence[ParamShard], exchange_config: ExchangeConfig, config: Any
) -> UpdateRule:
    """Create the update rule of an optimizer of matrices; collective over the shards' ranks."""
    if spec.layout == "matrix_update":
        update_rule: UpdateRule = spec.optimizer.update_rule_over(shards, exchange_config)
        return update_rule
    refuse_own_step(spec.optimizer)
    # a user's own optimizer may step parameters that are no matrices, in their own shape
    shapes = [
        shard.layouts[0].shape
        if spec.name or shard.param.dim() == 2 or len(shard.split.shape) == 3
        else (shard.layouts[0].shape[0], *shard.param.shape[1:])
        for shard in shards
    ]
    init = spec.init_state_fn and functools.partial(spec.init_state_fn, spec.optimizer, config)
    check = spec.construct and functools.partial(fault_in, spec.construct)
    return WholeMatrixRule(spec.optimizer, init, shards, shapes, exchange_config, check)


def refuse_own_step(optimizer: Any) -> None:
    """Raise a ConfigurationError for a Muon of which a subclass overrides ``step``."""
    if hasattr(optimizer, "steps_in_pieces") and not steps_in_pieces(type(optimizer)):
        name = type(optimizer).__name__
        rule = "has a step of its own, which nobody calls: storages step update rules"
        hint = "Derive a rule from MuonRule, and set it as the class's update_rule_class"
        raise ConfigurationError("optimizer", name, rule, hint)
