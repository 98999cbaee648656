"""Routes a whole model, the same on all ranks, for optimizers and for printed tables."""

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_eopt.base.agreement import gather_objects, gather_unique, raise_together
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.log import inform, warn
from megatron_eopt.base.names import STANDARD_OPTIMIZERS
from megatron_eopt.base.place import whole_shape
from megatron_eopt.config.arguments import qkv_split_shapes
from megatron_eopt.config.checks import check_values, warn_of_unused
from megatron_eopt.config.keys import get_standard_config_overrides, without
from megatron_eopt.config.registry import Overrides, steps_matrices
from megatron_eopt.config.settings import RunSettings, Settings
from megatron_eopt.matrices import Split
from megatron_eopt.routing.global_names import name_parameters
from megatron_eopt.routing.groups import Group, build_groups, summarize
from megatron_eopt.routing.parameters import INPUT_LAYER, ModelParameter, trainable_parameters
from megatron_eopt.routing.places import NO_LAYER, HeldParameter, places_in
from megatron_eopt.routing.routes import (
    GroupKey,
    Route,
    overrides_of,
    read_overrides,
    route_all,
    unmatched,
)
from megatron_eopt.routing.splits import (
    NO_ORDER,
    QKV_TAG,
    declared_qkv,
    find_splits,
    layer_kind,
    of_all_layers,
)

logger = logging.getLogger(__name__)

_COLUMNS = ("parameter", "shape", "optimizer", "split", "lr", "weight decay", "why")


@dataclass(frozen=True)
class Routing:
    """The optimizer, group and split of every parameter."""

    routes: Sequence[Route]  # this rank's parameters, in model order
    groups: Sequence[Group]  # the same on every rank, except for their parameters
    splits: Mapping[torch.nn.Parameter, Split]  # the logical matrices of fused parameters
    places: Sequence[HeldParameter] = ()  # where the model has its parameters, frozen ones too

    @property
    def optimizers(self) -> frozenset[str]:
        """Names of the optimizers that any rank uses."""
        return frozenset(group.key.optimizer for group in self.groups)

    @property
    def overrides(self) -> Overrides:
        """Overrides that give each parameter its settings, for megatron-core's factory."""
        return overrides_of(
            (group.key.values, [route.parameter.param for route in group.routes])
            for group in self.groups
        )

    @functools.cached_property
    def names(self) -> Mapping[torch.Tensor, str]:
        """Name of every parameter, in model order."""
        return {route.parameter.param: route.parameter.name for route in self.routes}

    def over(self, shards: Mapping[torch.Tensor, torch.nn.Parameter]) -> "Routing":
        """Return this routing with each parameter replaced by its tensor in ``shards``."""

        def moved(route: Route) -> Route:
            parameter = route.parameter
            return replace(route, parameter=replace(parameter, param=shards[parameter.param]))

        return replace(
            self,
            routes=[moved(route) for route in self.routes],
            groups=[
                replace(group, routes=tuple(map(moved, group.routes))) for group in self.groups
            ],
            splits={shards[param]: split for param, split in self.splits.items()},
        )

    @functools.cached_property
    def matrices(self) -> Mapping[torch.Tensor, Split | None]:
        """The split of every parameter; None if it is one matrix."""
        return {r.parameter.param: self.splits.get(r.parameter.param) for r in self.routes}


def overrides_for(settings: Settings, overrides: Overrides | None) -> Overrides:
    """Return the given overrides, or megatron-core's standard ones if they are None.

    Raises:
        ConfigurationError: If a key or a value is invalid.
        ConfigurationTypeError: If one has a wrong type.
    """
    if overrides is not None:
        return read_overrides(overrides, own_loop=settings.own_loop)
    return get_standard_config_overrides(settings.config)


def route_model(
    settings: Settings, model_chunks: Sequence[torch.nn.Module], overrides: Overrides
) -> Routing:
    """Route every trainable parameter of a Megatron model; collective over all ranks.

    Raises:
        ConfigurationError: On all ranks, if an override or a setting is invalid, or if pipeline
            stages would update a shared embedding differently.
    """
    places = places_in(model_chunks)
    parameters = trainable_parameters(places)
    if not settings.is_standard:
        # overrides may match these attributes, as in megatron-core
        _tag_as_megatron_does(parameters, model_chunks)
    routing = replace(route_parameters(settings, parameters, overrides), places=places)
    _check_shared_embeddings(routing)
    if routing.optimizers <= set(STANDARD_OPTIMIZERS):
        return routing
    name_parameters(places)
    routing = with_splits(routing, settings, places)
    # an override has chosen an emerging optimizer. With Adam as the main one, megatron-core sets no
    # attributes that overrides could match, so they follow only now
    if settings.is_standard:
        _tag_as_megatron_does(parameters, model_chunks)
    return routing


def route_parameters(
    settings: Settings,
    parameters: Sequence[ModelParameter],
    overrides: Overrides,
    standard: Overrides | None = None,
) -> Routing:
    """Route the given parameters, without splits; collective over all ranks."""
    routes = raise_together(lambda: route_all(parameters, overrides, settings, standard))
    # a trainer passes megatron-core's standard overrides, which a model may have no use for
    written = without(overrides, get_standard_config_overrides(settings.config))
    lost = frozenset(unmatched(parameters, written))
    reports = gather_objects((summarize(routes), lost, any(p.is_router for p in parameters)))
    summaries = [summary for groups, _, _ in reports for summary in groups]
    if summaries:
        # a key may match parameters of other pipeline stages, so only keys that no rank uses are
        # lost
        for description in sorted(frozenset.intersection(*(lost for _, lost, _ in reports))):
            warn(logger, "config_overrides: no parameter matches %s", description)
    has_router = any(found for *_, found in reports)
    if settings.excludes_routers and not has_router:
        text = "muon_orthogonalize_router=False: found no trainable router. If the model has one, "
        text += "set use_muon = False on its weight"
        warn(logger, text)
    groups = build_groups(routes, summaries)
    routing = Routing(routes, groups, {})
    names = routing.optimizers
    steps_nothing = groups and not settings.is_standard and settings.optimizer not in names
    if steps_nothing:
        text = "optimizer=%r is not used: no trainable parameter is a matrix, so all use %s. "
        text += "--print-optimizer-routing shows the reason for each"
        warn(logger, text, settings.optimizer, " and ".join(sorted(names)))
    # the others were checked when the configuration was resolved
    if chosen := names - {settings.optimizer, settings.scalar}:
        raise_together(lambda: check_values(settings.config, chosen))
    warn_of_unused(settings.config, settings.optimizer, names | {settings.scalar})
    return routing


def with_splits(routing: Routing, settings: Settings, places: Sequence[HeldParameter]) -> Routing:
    """Return the routing with the splits of fused weights; collective over all ranks."""
    used = routing.optimizers
    splitting = {name for name in used if settings.splits_weights_of(name)}
    of_matrices = set(filter(steps_matrices, used))
    unsplit = {r.parameter.param for r in routing.routes if r.optimizer not in splitting}
    flattened = {
        route.parameter.param
        for route in routing.routes
        if route.parameter.is_convolution and route.optimizer in of_matrices
    }
    how: Any = {"which": settings.splits, "unsplit": unsplit, "flattened": flattened}
    splits = raise_together(lambda: find_splits(places, **how))
    stacks = [route for route in routing.routes if route.why.startswith("3-D")]
    if names := [r.parameter.name for r in stacks if r.parameter.param in splits]:
        logger.warning(
            "These 3-D weights hold one matrix per expert, but get the scalar optimizer, as in "
            "megatron-core: %s. To update them as matrices, set param.eopt_split to 'whole', or to "
            "a Split such as matrices.gated(param.shape) for gate and up projections.",
            ", ".join(names),
        )
    no_layer = [r.parameter for r in routing.routes if r.why.startswith(NO_LAYER)]
    raw = [parameter.name for parameter in no_layer if parameter.has_matrix_shape]
    if raw:
        warn(
            logger,
            "These 2-D parameters are not the weight of a layer, so %s updates them: %s. Set "
            "param.eopt_split = 'whole' on those that are matrices.",
            settings.scalar,
            of_all_layers(raw),
        )
    inputs = [r.parameter.name for r in routing.routes if r.why.startswith(INPUT_LAYER)]
    if inputs:
        warn(
            logger,
            "%s reads the input, so %s updates it. Set its eopt_split = 'whole' to let %s do so.",
            ", ".join(inputs),
            settings.scalar,
            settings.optimizer,
        )
    as_stored = [
        r.parameter.name
        for r in routing.routes
        if r.optimizer in of_matrices
        and (split := splits.get(r.parameter.param)) is not None
        and split.kind == NO_ORDER
    ]
    if as_stored:
        warn(
            logger,
            "These weights have one matrix per expert, but the classes of their modules are not "
            "known, so they are updated as (experts, out, in): %s. Set param.eopt_split = 'whole' "
            "if that is right, or 'transposed' if they are (experts, in, out).",
            of_all_layers(as_stored),
        )
    return replace(routing, splits=splits)


def _check_shared_embeddings(routing: Routing) -> None:
    """Raise on every rank if pipeline stages would update a shared embedding differently.

    The stages sum its gradients, so a stage that freezes it would leave the others waiting, and
    copies with different settings would diverge.
    """
    shared = [place for place in routing.places if getattr(place.param, "shared_embedding", False)]
    routes = {route.parameter.param: route for route in routing.routes} if shared else {}
    own_keys = {
        (place.global_name, routes[place.param].key if place.param in routes else None)
        for place in shared
    }
    keys_of: dict[str, list[GroupKey | None]] = {}
    for name, key in gather_unique(own_keys):
        keys_of.setdefault(name, []).append(key)
    for name, keys in keys_of.items():
        # stages that agree have sent the same pair of name and key
        if len(keys) > 1:
            kinds = (f"{key.optimizer} {dict(key.values)}" if key else "frozen" for key in keys)
            rule = f"pipeline stages that share {name} must update it with the same settings"
            hint = "Freeze all copies or none, and let override keys match this name"
            value = " and ".join(sorted(kinds))
            raise ConfigurationError("config_overrides, requires_grad", value, rule, hint)


def _tag_as_megatron_does(
    parameters: Sequence[ModelParameter], model_chunks: Sequence[torch.nn.Module]
) -> None:
    """Set the parameter attributes that megatron-core sets, which its optimizers may read."""
    for parameter in parameters:
        param, name = parameter.param, parameter.name
        if "experts" in name and "shared" not in name:
            param.expert_tp = True  # type: ignore[attr-defined]
        if "linear_qkv.weight" in name and param.dim() == 2 and declared_qkv(param) is None:
            shapes = qkv_split_shapes(model_chunks[parameter.chunk].config)
            if sum(shapes) and whole_shape(param)[0] % sum(shapes) == 0:
                param.is_qkv = True  # type: ignore[attr-defined]
                param.qkv_split_shapes = shapes  # type: ignore[attr-defined]
                setattr(param, QKV_TAG, shapes)


def log_routing(settings: Settings, routing: Routing) -> None:
    """Log rank 0's routing table if ``print_optimizer_routing`` is set."""
    if settings.config.print_optimizer_routing:
        inform(logger, f"optimizer routing\n{format_routing(settings, routing)}")


def format_routing(settings: RunSettings, routing: Routing) -> str:
    """Return a Markdown table of this rank's parameters in model order, and a line of sums.

    Parameters of repeated layers that get the same have one row, with ``*`` for the numbers of the
    layers, how many they are, and the shape and split of the first.
    """
    found: dict[tuple[str, ...], list[tuple[str, str, str]]] = {}
    for route in routing.routes:
        item, values = route.parameter, route.values
        decay = values.get("start_wd", settings.config.weight_decay) * values.get("wd_mult", 1.0)
        rate = values.get("max_lr", settings.config.lr)
        rates = ("" if rate is None else f"{rate:g}", f"{decay:g}")
        shape = " x ".join(map(str, item.shape)) + (" (expert)" if item.is_expert else "")
        split = routing.splits.get(item.param)
        key = (layer_kind(item.name), route.optimizer, split.kind if split else "", *rates)
        row = (item.name, shape, _describe(split))
        found.setdefault((*key, route.why), []).append(row)
    rows = []
    for (kind, optimizer, _, *cells), alike in found.items():
        names, shapes, splits = map(list, zip(*alike, strict=True))
        name = names[0] if len(names) == 1 else f"{kind} ({len(names)})"
        shape, split = (its[0] + ", ..." * (len(set(its)) > 1) for its in (shapes, splits))
        rows.append((name, shape, optimizer, split, *cells))
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    lines = [_COLUMNS, ["-" * width for width in widths], *rows]
    padded = (map(str.ljust, line, widths) for line in lines)
    return "\n".join([*(f"| {' | '.join(cells)} |" for cells in padded), "", _sums(routing)])


def _sums(routing: Routing) -> str:
    """Return how many parameters, and numbers in them, each optimizer updates."""
    sizes: dict[str, list[int]] = {}
    for route in routing.routes:
        sizes.setdefault(route.optimizer, []).append(math.prod(route.parameter.shape))
    whole = sum(map(sum, sizes.values())) or 1
    texts = (
        f"{name} {len(its)} parameters, {sum(its):,} numbers ({sum(its) / whole:.1%})"
        for name, its in sizes.items()
    )
    return f"In all: {'; '.join(texts)}"


def _describe(split: Split | None) -> str:
    """Return the parts of a split, for example ``qkv: q 64 x 32, k 32 x 32, v 32 x 32``."""
    if split is None:
        return "-"
    sizes = ((p.name, *([p.count] if p.count > 1 else []), *p.shape) for p in split.parts)
    parts = (f"{name} {' x '.join(map(str, numbers))}" for name, *numbers in sizes)
    return f"{split.kind}: " + ", ".join(parts)
