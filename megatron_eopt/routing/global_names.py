"""Names of parameters in the whole model, which are the same at every parallel layout."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.names import GLOBAL_NAME_ATTRIBUTE
from megatron_eopt.routing.places import of_megatron
from megatron_eopt.routing.plain_names import held_paths, plain_names, renamed, renamed_paths

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
    layers: dict[str, str] = {}
    experts: dict[str, Sequence[int] | None] = {"": None}
    for path, module in model.named_modules():
        above, _, child = path.rpartition(".")
        # Megatron's numbers begin with 1, but those of other modules may begin with 0
        number = getattr(module, "layer_number", None)
        if child.isdigit() and isinstance(number, int) and of_megatron(module):
            layers[path] = str(number - 1)
        if path:
            # what a rank calls expert 0 is another expert on each expert-parallel rank
            experts[path] = experts[above] or getattr(module, "local_expert_indices", None)
    held = frozenset[str]() if with_wrappers else held_paths(model)
    paths = renamed_paths(model, held, layers)
    found = {}
    for name, _ in model.named_parameters():
        found[name] = renamed(name, paths)
        if (indices := experts[name.rpartition(".")[0]]) is not None:
            found[name] = _EXPERT.sub(_numbered(indices), found[name])
    for name, param in model.named_parameters():
        if getattr(param, "shared_embedding", False):
            found[name] = _OUTPUT.sub("embedding.word_embeddings.weight", found[name])
    return found


def _numbered(indices: Sequence[int]) -> Callable[[re.Match[str]], str]:
    return lambda match: str(indices[int(match[0])])


def names_in(model_chunks: Sequence[Any]) -> dict[Tensor, str]:
    """Return the name of every parameter of a model's chunks, unique on this rank."""
    prefix = "chunk {}: {}" if len(model_chunks) > 1 else "{1}"
    return {
        param: prefix.format(number, plain[name])
        for number, chunk in enumerate(model_chunks)
        for plain in [plain_names(chunk)]
        for name, param in chunk.named_parameters()
    }
