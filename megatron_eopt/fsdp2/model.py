"""What the parameters of a plain PyTorch model are, and which models are refused."""

import fnmatch
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import STACK_ATTRIBUTE
from megatron_eopt.routing.parameters import ModelParameter
from megatron_eopt.routing.splits import tensor_parallel_cut

__all__ = ["OUTPUT_LAYERS", "check_parameters", "mark_parameters"]

logger = logging.getLogger(__name__)

OUTPUT_LAYERS = ("lm_head", "*.lm_head", "output", "output_layer", "*.output_layer", "embed_out")
"""Shell-style patterns of the module paths that output layers usually have."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def mark_parameters(model: nn.Module, output_layers: Sequence[str]) -> None:
    """Mark the weights of output layers, and 3-D weights that are stacks of matrices.

    A 3-D weight is a stack where the user declared ``eopt_split``, or where a part of its path is
    ``experts``. All others, such as those of convolutions, are no matrices.

    Args:
        model: The model.
        output_layers: Shell-style patterns of module paths.

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
        if param.dim() == 3 and (hasattr(param, "eopt_split") or "experts" in name.split(".")):
            setattr(param, STACK_ATTRIBUTE, True)


def _warn_of_output_layers(model: nn.Module) -> None:
    """Warn of a linear layer that has a row for every entry of an embedding table."""
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(module, nn.Linear) or any(weight is table for table in tables):
            continue
        if any(table.shape == module.weight.shape for table in tables):
            logger.warning(
                "%s has the shape of an embedding table and counts as a matrix. If it is the "
                "output layer, pass output_layers=[%r].",
                path,
                path,
            )


def check_parameters(parameters: Sequence[ModelParameter]) -> None:
    """Raise for the first parameter that cannot be stepped as it is stored.

    Raises:
        ConfigurationError: See the messages.
    """
    if not parameters:
        rule = "has no parameter that requires a gradient"
        raise ConfigurationError("model", "no trainable parameter", rule, "Unfreeze some")
    sharded = any(_mesh_size(item.param) > 1 for item in parameters)
    stored_by: dict[int, str] = {}
    for item in parameters:
        _check_storage(item.name, item.param, sharded)
        local: Any = item.param
        if isinstance(local, DTensor):
            local = local.to_local()
        if local.dtype not in _DTYPES:
            rule = f"must be one of {', '.join(map(str, _DTYPES))}"
            way_out = "Convert the model before sharding it"
            raise ConfigurationError(f"{item.name}.dtype", local.dtype, rule, way_out)
        other = stored_by.setdefault(local.data_ptr(), item.name) if local.numel() else item.name
        if other != item.name:
            rule = f"shares its storage with {other}, so it would be stepped twice"
            way_out = "Tie weights by assigning the same Parameter before fully_shard"
            raise ConfigurationError("model", item.name, rule, way_out)


def _check_storage(name: str, param: nn.Parameter, sharded: bool) -> None:
    if param.device.type == "meta":
        way_out = "Call model.to_empty(device=...), initialize it, then build the optimizer"
        raise ConfigurationError(name, "meta device", "has no storage yet", way_out)
    if not isinstance(param, DTensor):
        if sharded:
            rule = "is a plain tensor beside DTensors, so no mesh manages it"
            way_out = (
                "Let fully_shard manage it, freeze it, or build the optimizer before the first "
                "forward pass, while everything is sharded"
            )
            raise ConfigurationError(name, tuple(param.shape), rule, way_out)
        return
    mesh = param.device_mesh
    shown = tuple(param.placements)
    for placement in shown:
        # strided shards are not instances of Shard in every version
        cut = isinstance(placement, Shard) or hasattr(placement, "split_factor")
        if not (cut or isinstance(placement, Replicate)):
            rule = "must be Shard or Replicate on every mesh dimension"
            raise ConfigurationError(name, shown, rule, "Redistribute the parameter")
    if mesh.get_coordinate() is None:
        rule = f"is on a mesh without rank {dist.get_rank()}"
        raise ConfigurationError(name, mesh.mesh.tolist(), rule, "Shard it over this rank's mesh")
    local = param.to_local()
    if local.device.type != mesh.device_type:
        rule = f"is stored on {local.device.type}, but its mesh communicates on {mesh.device_type}"
        way_out = "Shard without CPUOffloadPolicy"
        raise ConfigurationError(name, shown, rule, way_out)
    ranks, dim = tensor_parallel_cut(param)
    if ranks > 1:
        rule = (
            f"is cut over {ranks} tensor-parallel ranks along dimension {dim}, and its mesh "
            f"{mesh.mesh_dim_names or mesh.shape} has no dimension for them"
        )
        way_out = "Cut it with parallelize_module on a mesh that fully_shard's mesh is a part of"
        raise ConfigurationError(name, shown, rule, way_out)


def _mesh_size(param: nn.Parameter) -> int:
    return param.device_mesh.size() if isinstance(param, DTensor) else 1
