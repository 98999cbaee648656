"""Build the optimizer of any PyTorch model, sharded or not, for your own training loop."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatron_eopt.base.agreement import is_rank_0, raise_together, unconnected_processes
from megatron_eopt.base.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    refuse_deepspeed,
)
from megatron_eopt.base.log import warn
from megatron_eopt.base.names import OUTPUT_ATTRIBUTE
from megatron_eopt.config.arguments import arguments_of
from megatron_eopt.config.checks import check_alike
from megatron_eopt.config.fields import FieldType
from megatron_eopt.config.keys import ParamKey, ParamWithNamePredicate
from megatron_eopt.config.registry import Overrides
from megatron_eopt.config.settings import Settings, resolve
from megatron_eopt.config.values import read_value
from megatron_eopt.fsdp2.dtensors import build_dtensors, check_parameters, settings_for_dtensors
from megatron_eopt.fsdp2.optimizer import DTensorOptimizer
from megatron_eopt.optimizers import built_in as _built_in  # noqa: F401  registers optimizers
from megatron_eopt.optimizers.lending import sparse_gradient
from megatron_eopt.optimizers.off_loading import off_load
from megatron_eopt.optimizers.update_rule import check_rates
from megatron_eopt.optimizers.warnings import log_differences
from megatron_eopt.routing.frozen import Frozen
from megatron_eopt.routing.global_names import names_of
from megatron_eopt.routing.model import (
    Routing,
    log_routing,
    overrides_for,
    route_parameters,
    with_splits,
)
from megatron_eopt.routing.outputs import OUTPUT_LAYERS, likely_heads
from megatron_eopt.routing.outputs import output_layers as find_output_layers
from megatron_eopt.routing.parameters import (
    ModelParameter,
    is_table,
    trainable_parameters,
)
from megatron_eopt.routing.places import ModelWalk
from megatron_eopt.routing.plain_names import is_a
from megatron_eopt.routing.splits import of_all_layers
from megatron_eopt.storage.uneven import prepare, uneven_kind

logger = logging.getLogger(__name__)

_NAMES = FieldType(tuple[str, ...])


class Framework:
    """Shards a model and its gradients as torch does; Megatron-FSDP has a class of its own."""

    optimizer_cls: Any = DTensorOptimizer
    clip = "torch.nn.utils.clip_grad_norm_"  # the function that clips gradients

    def check(self, walk: ModelWalk) -> None:
        """Raise an error for a model that is not supported."""
        named = names_of(walk.places).items()
        check_parameters({param: name for param, name in named if param.requires_grad})

    def whole_parameters(self) -> AbstractContextManager[None]:
        """In a block, let the model have the parameters that are routed."""
        return nullcontext()

    def over_shards(self, routing: Routing) -> Routing:
        """Return the routing of what is stepped."""
        return routing


def build_optimizer(
    model: nn.Module,
    config: Any,
    config_overrides: Overrides | None = None,
    *,
    output_layers: str | Sequence[str] = OUTPUT_LAYERS,
) -> DTensorOptimizer:
    """Build the optimizer of a PyTorch model for your own training loop.

    Shard the model first with torch's ``fully_shard`` (after ``parallelize_module``, if you use
    it). Models that are not sharded work too. All ranks must call this function together, and not
    between a forward pass and its backward pass.

    Args:
        model: The model. Its parameters are DTensors on a mesh of any number of dimensions, or all
            of them are plain tensors.
        config: A ``TorchOptimizerConfig``, or any dataclass with fields of these names, such as
            megatron-core's ``OptimizerConfig``. ``clip_grad`` is not applied: clip gradients in
            your training loop.
        config_overrides: Settings for some parameters, by ``ParamKey``: ``optimizer``, rates such
            as ``lr``, and arguments of their optimizer. megatron-core's standard overrides, such as
            no weight decay of norms and biases, hold where these have no others.
        output_layers: Shell-style patterns of the module paths of output layers, or one such
            pattern. Their weights get the scalar optimizer (Adam unless configured otherwise), as
            embeddings do.

    Returns:
        A ``torch.optim.Optimizer``. All ranks must call its ``step`` and ``state_dict`` together.

    Raises:
        ConfigurationError: If a value is invalid, or a combination or a parameter is not supported.
        ConfigurationTypeError: If a value has the wrong type.
    """
    if isinstance(model, nn.Module):
        _refuse_megatron_fsdp(model)
    return build_with(Framework(), model, config, config_overrides, output_layers)


def build_with(
    framework: Framework,
    model: nn.Module,
    config: Any,
    config_overrides: Overrides | None,
    output_layers: str | Sequence[str],
) -> DTensorOptimizer:
    """Build the optimizer of a model that ``framework`` shards; see :func:`build_optimizer`."""

    def checked() -> tuple[Settings, ModelWalk, dict[str, nn.Module]]:
        settings = settings_for_dtensors(resolve(config), own_loop=True)
        walk = ModelWalk(model)
        refuse_deepspeed(any(hasattr(place.param, "ds_id") for place in walk.places))
        framework.check(walk)
        patterns = read_value("output_layers", output_layers, _NAMES)
        return settings, walk, find_output_layers(walk, patterns)

    if not isinstance(model, nn.Module):
        rule, hint = "must be an nn.Module", "Pass the model itself, not its parameters"
        raise ConfigurationTypeError("model", model, rule, hint)
    refuse_deepspeed(is_a(model, "deepspeed", "DeepSpeedEngine"))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the root stays unsharded after a forward pass
    prepare(model.parameters())
    with framework.whole_parameters():
        settings, walk, outputs = raise_together(checked)
        check_alike(settings.config)
        routing = _route(settings, walk, config_overrides, outputs)
        frozen = Frozen([walk])
    log_routing(settings, routing)
    _warn_unless_connected()
    _warn_of_float16(routing)
    if settings.config.clip_grad and is_rank_0():
        text = "clip_grad=%s is not applied. Call %s in your training loop, or set clip_grad=0."
        logger.info(text, settings.config.clip_grad, framework.clip)
    lowest = [name for name in ("min_lr", "muon_min_lr") if getattr(settings.config, name, None)]
    if lowest:
        text = "%s has no effect: your scheduler decides how far rates fall"
        warn(logger, text, " and ".join(lowest))
    routing = framework.over_shards(routing)
    kinds = filter(None, map(uneven_kind, routing.names))
    cls = next((kind.own_loop_cls for kind in kinds if kind.own_loop_cls), framework.optimizer_cls)
    optimizer: DTensorOptimizer = raise_together(lambda: build_dtensors(settings, routing, cls))
    check_rates(optimizer.param_groups, "Set lr in the configuration")
    off_load(optimizer, settings)
    log_differences(settings, arguments_of(routing.optimizers, settings, [model], None))
    optimizer.collects_stats = settings.config.log_optimizer_stats
    optimizer.frozen = frozen
    return optimizer


def _refuse_megatron_fsdp(model: nn.Module) -> None:
    """Raise a ConfigurationError for a model that Megatron-FSDP shards, and say what to import."""
    rule = "is sharded by Megatron-FSDP, whose support must be imported"
    if any(is_a(module, "megatron", "MegatronFSDP") for module in model.modules()):
        hint = "Use build_optimizer of megatron_eopt.megatron_fsdp"
        raise ConfigurationError("model", type(model).__name__, rule, hint)
    in_units = (param for param in model.parameters() if hasattr(param, "_mfsdp_parameter_group"))
    if any(uneven_kind(param) is None for param in in_units):
        hint = "Import megatron_eopt.contrib.megatron_fsdp_v2 before you build the optimizer"
        raise ConfigurationError("model", type(model).__name__, rule, hint)


def _warn_unless_connected() -> None:
    """Warn if a launcher has started several processes, and each is about to train alone."""
    if processes := unconnected_processes():
        logger.warning(
            "WORLD_SIZE is %d, but processes are not connected: each trains a model of its own. "
            "Call torch.distributed.init_process_group before build_optimizer, or pass cpu=True to "
            "accelerate's Accelerator on CPUs.",
            processes,
        )


def _warn_of_float16(routing: Routing) -> None:
    names = [name for param, name in routing.names.items() if param.dtype == torch.float16]
    if names:
        warn(
            logger,
            "These float16 weights are rounded after each step, which loses small updates: %s. "
            "Keep them in float32, and compute in float16 by torch.autocast and GradScaler.",
            of_all_layers(names),
        )


def _route(
    settings: Settings,
    walk: ModelWalk,
    config_overrides: Overrides | None,
    outputs: Mapping[str, nn.Module],
) -> Routing:
    """Route a model by its modules and its output layers; collective."""
    of_outputs = [param for module in outputs.values() for param in module.parameters()]
    parameters = trainable_parameters(walk.places, of_outputs, stacks=True)
    given = {} if config_overrides is None else config_overrides
    overrides = raise_together(lambda: overrides_for(settings, given))
    standard = overrides_for(settings, None)
    if not settings.is_standard:
        standard = {**standard, **_without_decay(parameters)}
    # only while overrides are matched, since a mark would stay on the user's model
    with _marked(item.param for item in parameters if item.is_embedding):
        routing = route_parameters(settings, parameters, overrides, standard)
    routing = with_splits(routing, settings, walk.places)
    raise_together(lambda: _refuse_sparse(walk))
    of_main = {r.parameter.param for r in routing.routes if r.optimizer == settings.optimizer}
    heads = [
        path
        for path, module in likely_heads(walk, outputs).items()
        if not settings.is_standard and not of_main.isdisjoint(module.parameters())
    ]
    if heads:
        text = (
            "%s: looks like an output layer, but %s updates it as a hidden one. If it is an output "
            "layer, pass output_layers=%r."
        )
        names = ", ".join(heads)
        warn(logger, text, names, settings.optimizer, [*outputs, *heads])
    return routing


def _without_decay(parameters: Sequence[ModelParameter]) -> Overrides:
    """Return an override that exempts all but weights of layers and tables from weight decay.

    megatron-core's standard overrides do so for 1-D parameters and biases, but not for single
    numbers, such as a temperature.
    """
    vectors = {
        id(p.param) for p in parameters if (p.why_vector or not p.shape) and not p.is_declared
    }
    vectors -= {id(p.param) for p in parameters if p.is_embedding}
    if not vectors:
        return {}
    predicate = ParamWithNamePredicate(
        name="not a layer's weight", fn=lambda param, _: id(param) in vectors
    )
    return {ParamKey(with_name_predicate=predicate): {"wd_mult": 0.0}}


@contextmanager
def _marked(params: Iterable[Tensor]) -> Iterator[None]:
    """In a block, let tables and output layers have megatron-core's mark, which overrides match."""
    unmarked = [param for param in params if not hasattr(param, OUTPUT_ATTRIBUTE)]
    for param in unmarked:
        setattr(param, OUTPUT_ATTRIBUTE, True)
    try:
        yield
    finally:
        for param in unmarked:
            delattr(param, OUTPUT_ATTRIBUTE)


def _refuse_sparse(walk: ModelWalk) -> None:
    """Raise a ConfigurationError if a trainable table has sparse gradients."""
    for path, module in walk.modules.items():
        is_sparse = is_table(module) and getattr(module, "sparse", False)
        if is_sparse and any(param.requires_grad for param in module.parameters()):
            raise sparse_gradient(f"{walk.paths[path]}.sparse".lstrip("."), True)
