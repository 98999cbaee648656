"""Names of parameters in the whole model, which are the same at every parallel layout."""

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from megatron_eopt.base.names import GLOBAL_NAME_ATTRIBUTE

_EXPERT = re.compile(r"(?<=\blocal_experts\.)\d+|(?<=\.weight)\d+$|(?<=\.bias)\d+$")


def name_parameters(model_chunks: Sequence[Any]) -> None:
    """Let every parameter of a model know its name in the whole model.

    Layers are counted over all pipeline stages and experts over all ranks, and no wrapper shows.
    """
    for model in model_chunks:
        if not isinstance(model, torch.nn.Module):
            continue
        layers, experts = {}, {}
        for path, module in model.named_modules():
            if isinstance(number := getattr(module, "layer_number", None), int):
                layers[path] = number - 1
            if indices := getattr(module, "local_expert_indices", None):
                experts[path] = list(indices)
        for name, param in model.named_parameters():
            setattr(param, GLOBAL_NAME_ATTRIBUTE, _global_name(name, layers, experts))


def _global_name(name: str, layers: Mapping[str, int], experts: Mapping[str, Sequence[int]]) -> str:
    words = name.split(".")
    paths = list(accumulate(words, "{}.{}".format))
    counted = [
        str(layers[path]) if word.isdigit() and path in layers else word
        for word, path in zip(words, paths, strict=True)
    ]
    found = re.sub(r"^(module\.)+", "", ".".join(counted))
    indices = next((experts[path] for path in paths if path in experts), None)
    if indices is None:
        return found
    return _EXPERT.sub(lambda match: str(indices[int(match[0])]), found)
