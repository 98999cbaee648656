"""Marks on a plain PyTorch model's parameters, which tell routing what they are."""

import fnmatch
import logging
from collections.abc import Sequence

from torch import nn

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import STACK_ATTRIBUTE

logger = logging.getLogger(__name__)

OUTPUT_LAYERS = ("lm_head", "*.lm_head", "output", "output_layer", "*.output_layer", "embed_out")
"""Shell-style patterns of the module paths that output layers usually have."""


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
