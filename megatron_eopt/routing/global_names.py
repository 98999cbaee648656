"""Names of parameters in the whole model, which are the same at every parallel layout."""

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.names import GLOBAL_NAME_ATTRIBUTE
from megatron_eopt.routing.places import of_megatron

_OUTPUT = re.compile(r"\boutput_layer\.weight$")
# ``local_experts.3``, and ``weight3`` or ``bias3`` of grouped experts
_EXPERT = re.compile(r"(?<=\blocal_experts\.)\d+|(?<=\.weight)\d+$|(?<=\.bias)\d+$")


def name_parameters(model_chunks: Sequence[Any]) -> None:
    """Store on every parameter its name in the whole model, without prefixes of wrappers."""
    for model in model_chunks:
        if isinstance(model, torch.nn.Module):
            counted = counted_names(model)
            for name, param in model.named_parameters():
                whole = re.sub(r"^(module\.)+", "", counted[name])
                setattr(param, GLOBAL_NAME_ATTRIBUTE, whole)


def counted_names(model: torch.nn.Module) -> dict[str, str]:
    """Return ``{name in this chunk: name in the whole model}`` for every parameter.

    Megatron's layers are numbered over all pipeline stages, its experts over all ranks. torch's
    ``_orig_mod`` is removed. An output layer that copies a tied embedding has the embedding's name.
    """
    layers, experts = {}, {}
    for path, module in model.named_modules():
        # Megatron's numbers begin with 1, but those of other modules may begin with 0
        if isinstance(number := getattr(module, "layer_number", None), int) and of_megatron(module):
            layers[path] = number - 1
        # what a rank calls expert 0 is another expert on each expert-parallel rank
        if indices := getattr(module, "local_expert_indices", None):
            experts[path] = list(indices)
    found = {name: _counted(name, layers, experts) for name, _ in model.named_parameters()}
    for name, param in model.named_parameters():
        if getattr(param, "shared_embedding", False):
            found[name] = _OUTPUT.sub("embedding.word_embeddings.weight", found[name])
    return found


def _counted(name: str, layers: Mapping[str, int], experts: Mapping[str, Sequence[int]]) -> str:
    words = name.split(".")
    paths = list(accumulate(words, "{}.{}".format))
    counted = ".".join(
        str(layers[path]) if word.isdigit() and path in layers else word
        for word, path in zip(words, paths, strict=True)
        if word != "_orig_mod"
    )
    indices = next((experts[path] for path in paths if path in experts), None)
    if indices is None:
        return counted
    return _EXPERT.sub(lambda match: str(indices[int(match[0])]), counted)


def names_in(model_chunks: Sequence[Any]) -> dict[Tensor, str]:
    """Return the name of every parameter of a model's chunks, unique on this rank."""
    prefix = "chunk {}: {}" if len(model_chunks) > 1 else "{1}"
    return {
        param: prefix.format(number, name)
        for number, chunk in enumerate(model_chunks)
        for name, param in chunk.named_parameters()
    }
