"""The optimizer of a plain PyTorch model, sharded or not, for a training loop of one's own."""

import fnmatch
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron.core.optimizer.optimizer_config import OptimizerConfig
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megatron_eopt.base.agreement import agreed
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import STACK_ATTRIBUTE
from megatron_eopt.build.dtensors import build_routed, resolve_for_dtensors
from megatron_eopt.build.megatron_fsdp import (
    MegatronFSDPOptimizer,
    faults,
    fsdp_modules,
    shards_of_parameters,
    whole_parameters,
)
from megatron_eopt.optimizers import built_in as _built_in  # noqa: F401  registers optimizers
from megatron_eopt.optimizers.sharded import ShardedOptimizer
from megatron_eopt.routing.model import overrides_for, route_parameters, with_splits
from megatron_eopt.routing.parameters import trainable_parameters
from megatron_eopt.settings.checks import check_alike, check_config
from megatron_eopt.settings.registry import Overrides
from megatron_eopt.settings.settings import Settings
from megatron_eopt.storage.dtensors import check_parameters

logger = logging.getLogger(__name__)

OUTPUT_LAYERS = ("lm_head", "*.lm_head", "output", "output_layer", "*.output_layer", "embed_out")
"""Shell-style patterns of the module paths that output layers usually have."""


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    config_overrides: Overrides | None = None,
    *,
    output_layers: Sequence[str] = OUTPUT_LAYERS,
) -> ShardedOptimizer:
    """Return the optimizer of a model that ``fully_shard`` has sharded, or of an unsharded one.

    Call it after torch's ``fully_shard`` (and after ``parallelize_module``) or Megatron-FSDP's
    ``fully_shard_model``, between passes. Nothing that is passed in is changed, apart from
    attributes that optimizers read from parameters. All ranks must call this together.

    Args:
        model: The model. Its parameters are DTensors on meshes of any number of dimensions, or
            plain tensors where nothing is sharded; or it is a ``MegatronFSDP``.
        config: What ``get_megatron_optimizer`` takes, usually an ``EmergingOptimizerConfig``.
            Gradients are clipped by the training loop, not here.
        config_overrides: Settings for some of the parameters; the key ``optimizer`` routes them.
            None means megatron-core's standard overrides, an empty dictionary none.
        output_layers: Shell-style patterns of the paths of output layers, whose weights go to the
            scalar optimizer as those of ``nn.Embedding`` do.

    Returns:
        An ordinary torch optimizer.

    Raises:
        ConfigurationError: If a value, a combination or a parameter cannot be honoured.
        ConfigurationTypeError: If a value has the wrong type.
    """

    def checked() -> tuple[Settings, Overrides]:
        check_config(config)
        settings = resolve_for_dtensors(config, own_loop=True)
        for error in faults(managing, own_loop=True):
            raise error
        if not managing:
            check_parameters(trainable_parameters([model]))
        mark_parameters(named, output_layers)
        return settings, overrides_for(settings, config_overrides)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass the root still has whole parameters
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    managing = fsdp_modules([model])
    # names are those that users gave
    named: Any = model.module if model in managing else model
    with whole_parameters([model]):
        settings, overrides = agreed(checked)
        check_alike(config)
        routing = route_parameters(settings, trainable_parameters([named]), overrides)
        routing = with_splits(routing, settings, [named])
    if settings.clip_grad:
        clip = "optimizer.clip_grad_norm" if managing else "torch.nn.utils.clip_grad_norm_"
        logger.info("clip_grad is for the training loop: %s", clip)
    if managing:
        routing = routing.over(shards_of_parameters([model]))
    cls = partial(MegatronFSDPOptimizer, managing) if managing else ShardedOptimizer
    return agreed(lambda: build_routed(settings, routing, cls))


def mark_parameters(model: nn.Module, output_layers: Sequence[str]) -> None:
    """Mark the weights of output layers, and 3-D weights that are stacks of matrices.

    A 3-D weight is a stack where a part of its path is ``experts``. All others, such as those of
    convolutions, are no matrices unless the user declares ``eopt_split``.

    Raises:
        ConfigurationError: If patterns other than the default ones match no module.
    """
    found = False
    for path, module in model.named_modules():
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in output_layers):
            found = True
            for weight in module.parameters():
                weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
    if not found and output_layers and tuple(output_layers) != OUTPUT_LAYERS:
        rule = "none of these patterns matches the path of a module"
        raise ConfigurationError("output_layers", output_layers, rule, "Name the output layer")
    if not found:
        _warn_of_output_layers(model)
    for name, param in model.named_parameters():
        if param.dim() == 3 and "experts" in name.split("."):
            setattr(param, STACK_ATTRIBUTE, True)


def _warn_of_output_layers(model: nn.Module) -> None:
    """Warn of a linear layer that has a row for every entry of an embedding table."""
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear) or any(module.weight is table for table in tables):
            continue
        if any(table.shape == module.weight.shape for table in tables):
            text = (
                "%s has the shape of an embedding table and counts as a matrix. If it is the "
                "output layer, pass output_layers=[%r]."
            )
            logger.warning(text, path, path)
