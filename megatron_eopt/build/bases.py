"""The torch optimizers that a configuration asks for, and the drivers that step with them."""

import difflib
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import SCALAR_OPTIMIZERS, STEP
from megatron_eopt.optimizers.driver import Driver, InitState, ParamGroup
from megatron_eopt.optimizers.engine import Means
from megatron_eopt.optimizers.owner_driver import OwnerDriver
from megatron_eopt.optimizers.scalar import ELEMENT_WISE_CLASSES, build_scalar_optimizer
from megatron_eopt.routing.groups import param_group
from megatron_eopt.routing.model import Routing
from megatron_eopt.settings.arguments import arguments_of
from megatron_eopt.settings.fields import constructor_arguments
from megatron_eopt.settings.registry import StateLayoutT, entries, entry_of, steps_in_pieces
from megatron_eopt.settings.settings import Settings
from megatron_eopt.storage.shard import Shard

type Construct = Callable[[Sequence[ParamGroup]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Base:
    """A torch optimizer as a user passes one, or as a configuration asks for one."""

    optimizer: Any  # the torch optimizer, maybe over stand-ins; None if nothing is stepped
    init_state_fn: InitState  # makes its state exist, called as ``(optimizer, config)``
    groups: Sequence[ParamGroup]  # of the model's parameters
    is_clipped: bool = True  # whether its gradients are clipped
    construct: Construct | None = None  # makes an optimizer like it over other groups
    name: str = ""  # what a configuration calls it
    is_expert: bool = False  # whether it steps experts' parameters

    @property
    def layout(self) -> StateLayoutT:
        """What of it needs whole matrices; everything, if its class is not known."""
        cls = type(self.optimizer)
        if steps_in_pieces(cls):
            return "matrix_update"
        registered = entries().values()
        known = {item.optimizer_cls for item in registered if item.state_layout == "element_wise"}
        if getattr(self.optimizer, "frob_normalize", False):
            # LaProp then scales by norms of whole parameters
            return "matrix_state"
        return "element_wise" if cls in known | ELEMENT_WISE_CLASSES else "matrix_state"


def bases_of(
    settings: Settings,
    routing: Routing,
    model_chunks: Sequence[Any],
    pg_collection: Any,
    *,
    stand_ins: bool = False,
    plain: bool = False,
) -> list[Base]:
    """Return what the optimizers of a chain step: the main one first, dense before experts.

    Order and number are part of checkpoint formats, so they follow from what all ranks know.

    Args:
        settings: The configuration.
        routing: Which optimizer each parameter gets.
        model_chunks: The model.
        pg_collection: Process groups.
        stand_ins: Whether optimizers of matrices are made over stand-ins for the parameters, since
            a storage will step other tensors, and knows their logical matrices.
        plain: Whether Adam and SGD are torch's own.

    Raises:
        ConfigurationError: If a setting of an optimizer or of a group cannot be honoured.
    """
    main = settings.optimizer
    kinds = {(group.key.optimizer, group.key.is_expert) for group in routing.groups}
    bases = []
    for name, is_expert in sorted(kinds, key=lambda kind: (kind[0] != main, kind)):
        mine = [
            g for g in routing.groups if (g.key.optimizer, g.key.is_expert) == (name, is_expert)
        ]
        groups = [
            param_group(
                group,
                [route.parameter.param for route in group.routes],
                lr=settings.lr,
                min_lr=settings.min_lr,
            )
            for group in mine
        ]
        made_over = groups
        if plain or (stand_ins and name not in SCALAR_OPTIMIZERS):
            made_over = [{**g, "params": [nn.Parameter(torch.ones(1, 1))]} for g in groups]
        construct: Construct | None = None
        if name in SCALAR_OPTIMIZERS:
            optimizer, init_fn = build_scalar_optimizer(name, made_over, settings, plain=plain)
        else:
            entry = entry_of(name)
            kwargs = arguments_of(name, settings, model_chunks, pg_collection)
            if not stand_ins and "splits" in constructor_arguments(entry.optimizer_cls):
                kwargs["splits"] = routing.matrices
            construct = functools.partial(entry.optimizer_cls, **kwargs)
            optimizer, init_fn = _made(name, construct, made_over), entry.init_state_fn
            if entry.draws:
                _draw_alike(optimizer)
        _check_names(optimizer, {key for group in mine for key, _ in group.key.values})
        if settings.lr is None and "max_lr" not in settings.own_rates(name):
            # groups without a learning rate wait for a scheduler or a checkpoint to write it
            optimizer.defaults["lr"] = None
            for made, group in zip(optimizer.param_groups, mine, strict=True):
                made["lr"] = dict(group.key.values).get("lr")
        complete = [
            {**made, "params": group["params"]}
            for made, group in zip(optimizer.param_groups, groups, strict=True)
        ]
        is_clipped = not (settings.exempt_from_clipping and name == main)
        bases.append(Base(optimizer, init_fn, complete, is_clipped, construct, name, is_expert))
    return bases or [Base(None, None, [], name=main)]


def _draw_alike(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer step one parameter after another, drawing by its shape and count of steps.

    Copies have those in common on all ranks, at any layout, and in a run that goes on from a
    checkpoint; parameters of one shape draw the same. Nobody else's random numbers change. Steps
    are counted here if the class does not (PSGD's stay 0 in emerging-optimizers 0.3).
    """
    step = optimizer.step

    def step_one(param: Tensor) -> None:
        state: dict[str, Any] = optimizer.state[param]
        steps = int(state.get(STEP, 0))
        torch.manual_seed(zlib.crc32(repr((steps, tuple(param.shape))).encode()))
        step()
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
                    # what a step writes to its group, a count of steps, it writes once
                    group |= {**stepped, "params": group["params"]}
            finally:
                optimizer.param_groups = groups

    optimizer.step = step_all  # type: ignore[assignment, method-assign]


def _check_names(optimizer: torch.optim.Optimizer, names: set[str]) -> None:
    """Raise a ConfigurationError if a group's setting has a misspelled name."""
    read = {*param_group_identifier_keys, "lr", "weight_decay", "default_config"}
    known = read | optimizer.defaults.keys()
    for name in sorted(names - known):
        if near := difflib.get_close_matches(name, known, cutoff=0.75):
            rule = f"{type(optimizer).__name__} and Megatron's scheduler read no such setting"
            way_out = f"Did you mean {' or '.join(map(repr, near))}?"
            raise ConfigurationError("config_overrides", name, rule, way_out)


def _made(name: str, construct: Construct, groups: Sequence[ParamGroup]) -> torch.optim.Optimizer:
    try:
        return construct(groups)
    except ConfigurationError:
        raise
    except ValueError as error:
        rule = f"cannot start: {error}".rstrip(".")
        way_out = "Set its fields, and initialize weights, as it asks for before it is built"
        raise ConfigurationError("optimizer", name, rule, way_out) from error


def fault_in(construct: Construct, weights: Sequence[Tensor]) -> str | None:
    """Return why no optimizer can be made over whole weights; None if one can, or in a dry run."""
    if any(map(is_fake, weights)):
        return None
    copies = [nn.Parameter(weight.detach().clone()) for weight in weights]
    try:
        construct([{"params": copies}])
    except ValueError as error:
        return str(error).rstrip(".")
    pairs = zip(copies, weights, strict=True)
    kept = all(copy.allclose(weight, 0, 0, equal_nan=True) for copy, weight in pairs)
    return None if kept else "it would be changed, and what is stored of it would not"


def driver_over(
    base: Base,
    groups: Sequence[ParamGroup],
    shards: Mapping[Tensor, Shard],
    means: Means,
    config: Any,
) -> Driver:
    """Return the driver of an optimizer that needs matrices; collective over the shards' ranks.

    ``groups`` and ``shards`` are those of the model's parameters.
    """
    driver: Driver
    if base.layout == "matrix_update":
        driver = base.optimizer.driver_over(list(shards.values()), means)
    elif hasattr(type(base.optimizer), "steps_in_pieces"):
        raise ConfigurationError(
            "optimizer",
            type(base.optimizer).__name__,
            "overrides what a step of TensorParallelMuon calls with whole parameters, and this "
            "storage has parts of them",
            "Train without use_distributed_optimizer and FSDP, or override nothing of a step",
        )
    else:
        # what has other dimensions travels as a matrix, and steps in its own
        shapes = [
            shard.layouts[0].shape
            if param.dim() == 2
            else (shard.layouts[0].shape[0], *param.shape[1:])
            for param, shard in shards.items()
        ]
        init = base.init_state_fn and functools.partial(base.init_state_fn, base.optimizer, config)
        check = base.construct and functools.partial(fault_in, base.construct)
        driver = OwnerDriver(base.optimizer, init, list(shards.values()), shapes, means, check)
    group_of = {p: number for number, group in enumerate(groups) for p in group["params"]}
    driver.assign({number: group_of[param] for number, param in enumerate(shards)})
    return driver
