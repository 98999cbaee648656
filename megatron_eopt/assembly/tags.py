"""Attributes that optimizers read from the parameters they get."""

from collections.abc import Sequence
from typing import Any

import torch

from megatron_eopt.assembly.meaning import Meaning
from megatron_eopt.base.names import SPLIT_ATTRIBUTE
from megatron_eopt.matrices import Split
from megatron_eopt.optimizers.entries import qkv_split_shapes
from megatron_eopt.routing.routes import Route
from megatron_eopt.routing.splits import find_splits


def tag_parameters(
    routes: Sequence[Route], model_chunks: Sequence[torch.nn.Module], meaning: Meaning
) -> dict[torch.nn.Parameter, Split]:
    """Tell each matrix parameter its split and its tensor-parallel group; return the splits.

    Args:
        routes: Where this rank's parameters go.
        model_chunks: The wrapped model.
        meaning: The configuration.
    """
    if meaning.is_standard:
        return {}
    splits = find_splits(model_chunks, which=meaning.splits)
    for route in routes:
        param: Any = route.parameter.param
        setattr(param, SPLIT_ATTRIBUTE, splits.get(param))
        name = route.parameter.name
        if "experts" in name and "shared" not in name:
            param.expert_tp = True
        if "linear_qkv.weight" in name and param.dim() == 2 and "qkv" in meaning.splits:
            shapes = qkv_split_shapes(model_chunks[route.parameter.chunk].config)
            if param.shape[0] % sum(shapes) == 0:
                param.is_qkv = True
                param.qkv_split_shapes = shapes
    return splits


def copy_tags(wrapper: Any) -> None:
    """Give main copies of parameters what :func:`tag_parameters` told the parameters.

    Args:
        wrapper: megatron-core's wrapper, whose ``optimizer`` holds the main copies.
    """
    for group in getattr(wrapper, "float16_groups", ()):
        for param in group:
            if hasattr(param, SPLIT_ATTRIBUTE):
                setattr(param.main_param, SPLIT_ATTRIBUTE, getattr(param, SPLIT_ATTRIBUTE))
