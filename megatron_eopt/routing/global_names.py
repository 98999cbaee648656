"""Names of parameters in the whole model, which are the same at every parallel layout."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.names import GLOBAL_NAME_ATTRIBUTE
from megatron_eopt.routing.places import of_megatron
from megatron_eopt.routing.plain_names import held_paths, plain_names, words_of

_OUTPUT = re.compile(r"\boutput_layer\.weight$")
# ``local_experts.3``, and ``weight3`` or ``bias3`` of grouped experts
_EXPERT = re.compile(r"(?<=\blocal_experts\.)\d+|(?<=\.weight)\d+$|(?<=\.bias)\d+$")


def name_parameters(model_chunks: Sequence[Any]) -> None:
    """Store on every parameter its name in the whole model."""
    for model in model_chunks:
        if isinstance(model, torch.nn.Module):
            counted = counted_names(model)
            for name, param in model.named_parameters():
                setattr(param, GLOBAL_NAME_ATTRIBUTE, counted[name])


def counted_names(model: torch.nn.Module, *, with_wrappers: bool = False) -> dict[str, str]:
    """Return ``{name in this chunk: name in the whole model}`` for every parameter.

    Megatron's layers are numbered over all pipeline stages, its experts over all ranks. An output
    layer that copies a tied embedding has the embedding's name.
    """
    layers, experts = {}, {}
    for path, module in model.named_modules():
        # Megatron's numbers begin with 1, but those of other modules may begin with 0
        if isinstance(number := getattr(module, "layer_number", None), int) and of_megatron(module):
            layers[path] = number - 1
        # what a rank calls expert 0 is another expert on each expert-parallel rank
        if indices := getattr(module, "local_expert_indices", None):
            experts[path] = list(indices)
    held = frozenset[str]() if with_wrappers else held_paths(model)
    found = {name: _counted(name, layers, experts, held) for name, _ in model.named_parameters()}
    for name, param in model.named_parameters():
        if getattr(param, "shared_embedding", False):
            found[name] = _OUTPUT.sub("embedding.word_embeddings.weight", found[name])
    return found


def _counted(
    name: str,
    layers: Mapping[str, int],
    experts: Mapping[str, Sequence[int]],
    held: Collection[str],
) -> str:
    if not (layers or experts or held):
        return name
    words = words_of(name)
    counted = ".".join(
        str(layers[path]) if word.isdigit() and path in layers else word
        for path, word in words.items()
        if path not in held
    )
    indices = next((experts[path] for path in words if path in experts), None)
    if indices is None:
        return counted
    return _EXPERT.sub(lambda match: str(indices[int(match[0])]), counted)


def names_in(model_chunks: Sequence[Any]) -> dict[Tensor, str]:
    """Return the name of every parameter of a model's chunks, unique on this rank."""
    prefix = "chunk {}: {}" if len(model_chunks) > 1 else "{1}"
    return {
        param: prefix.format(number, plain[name])
        for number, chunk in enumerate(model_chunks)
        for plain in [plain_names(chunk)]
        for name, param in chunk.named_parameters()
    }
