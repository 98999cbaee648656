"""The optimizer of a plain PyTorch model, sharded or not, for a training loop of one's own.

It can go on with a run of ``torch.optim.Muon``.
"""

import fnmatch
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron_eopt.base.agreement import agreed
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import MOMENTUM, NO_MUON_ATTRIBUTE, STACK_ATTRIBUTE
from megatron_eopt.build import megatron_fsdp
from megatron_eopt.build.dtensors import build_routed, resolve_for_dtensors
from megatron_eopt.optimizers import built_in as _built_in  # noqa: F401  registers optimizers
from megatron_eopt.optimizers.sharded import ShardedOptimizer
from megatron_eopt.routing.model import overrides_for, route_parameters, with_splits
from megatron_eopt.routing.parameters import trainable_parameters
from megatron_eopt.settings.checks import check_alike, check_config
from megatron_eopt.settings.registry import Overrides
from megatron_eopt.settings.settings import Settings
from megatron_eopt.storage.dtensors import check_parameters, local_of

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
        for error in megatron_fsdp.faults(managing, own_loop=True):
            raise error
        if not managing:
            check_parameters(trainable_parameters([model]))
        mark_parameters(named, output_layers)
        return settings, overrides_for(settings, config_overrides)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass the root still has whole parameters
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    managing = megatron_fsdp.fsdp_modules([model])
    # names are those that users gave
    named: Any = model.module if model in managing else model
    with megatron_fsdp.whole_parameters([model]):
        settings, overrides = agreed(checked)
        check_alike(config)
        routing = route_parameters(settings, trainable_parameters([named]), overrides)
        routing = with_splits(routing, settings, [named])
    if settings.clip_grad:
        clip = "optimizer.clip_grad_norm" if managing else "torch.nn.utils.clip_grad_norm_"
        logger.info("clip_grad is for the training loop: %s", clip)
    if managing:
        routing = routing.over(megatron_fsdp.shards_of_parameters([model]))
    cls = partial(megatron_fsdp.MegatronFSDPOptimizer, managing) if managing else ShardedOptimizer
    return agreed(lambda: build_routed(settings, routing, cls))


def mark_parameters(model: nn.Module, output_layers: Sequence[str]) -> None:
    """Mark the weights of output layers, 3-D weights of experts as stacks, and 2-D biases.

    Other 3-D weights, such as those of convolutions, are no matrices unless the user declares
    ``eopt_split``. Biases of all experts of a layer can be in one 2-D parameter.

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
        if param.dim() == 3 and "experts." in name:
            setattr(param, STACK_ATTRIBUTE, True)
        elif param.dim() == 2 and "bias" in name.rpartition(".")[2]:
            setattr(param, NO_MUON_ATTRIBUTE, False)


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


@torch.no_grad()
def import_torch_muon(
    optimizer: ShardedOptimizer, state_dict: Mapping[str, Any], params: Sequence[str] | None = None
) -> None:
    """Take the momenta out of a ``torch.optim.Muon`` state dict; collective.

    Both keep the same moving average, so that nothing has to be converted. Settings are not taken
    over: they come from the configuration.

    Args:
        optimizer: Where the momenta go.
        state_dict: What ``torch.optim.Muon.state_dict()`` returned, or torch's
            ``get_optimizer_state_dict``. Momenta are whole tensors or DTensors.
        params: Names of the parameters in the order in which ``torch.optim.Muon`` got them, where
            the state dict has neither names nor ``param_names``.

    Raises:
        ConfigurationError: If names are unknown, a momentum is missing or has another shape.
    """
    momenta = _momenta_by_name(state_dict, params)
    optimizer.unpack()
    targets = {
        name: (param, optimizer.state[param][MOMENTUM])
        for param, name in optimizer.names.items()
        if MOMENTUM in optimizer.state[param] and param.dim() > 1
    }
    if odd := sorted(momenta.keys() - targets.keys()):
        rule = "are no parameters with a momentum of this optimizer"
        raise ConfigurationError("state_dict", odd[:8], rule, "Route them to Muon here too")
    if missing := sorted(targets.keys() - momenta.keys()):
        rule = "have no momentum in it"
        raise ConfigurationError("state_dict", missing[:8], rule, "Route them elsewhere here too")
    for name, (param, target) in targets.items():
        value = momenta[name]
        if value.shape != param.shape:
            rule = f"must have the shape {tuple(param.shape)}"
            raise ConfigurationError(name, tuple(value.shape), rule, "Load a fitting one")
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(param, DTensor):
            # every rank has the whole tensor and cuts it for itself
            mesh, placements = param.device_mesh, param.placements
            value = distribute_tensor(value, mesh, placements, src_data_rank=None)
        local_of(target).copy_(local_of(value))
    optimizer.pack()


def _momenta_by_name(
    state_dict: Mapping[str, Any], params: Sequence[str] | None
) -> dict[str, Tensor]:
    groups = state_dict["param_groups"]
    order = [key for group in groups for key in group["params"]]
    own = [name for group in groups for name in group.get("param_names", ())]
    names = params or own or order
    if len(names) != len(order) or not all(isinstance(name, str) for name in names):
        rule = f"must name the {len(order)} parameters of the state dict, in their order"
        raise ConfigurationError("params", params, rule, "Pass the names torch.optim.Muon got")
    state = state_dict["state"]
    return {
        name: state[key][MOMENTUM]
        for name, key in zip(names, order, strict=True)
        if MOMENTUM in state.get(key, ())
    }
