"""Names of parameters in the whole model, which are the same at every parallel layout."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.names import GLOBAL_NAME_ATTRIBUTE
from megatron_eopt.routing.places import of_megatron
from megatron_eopt.routing.plain_names import plain_names, renamed, renamed_paths

_OUTPUT = re.compile(r"\boutput_layer\.weight$")
# ``local_experts.3``, and ``weight3`` or ``bias3`` of grouped experts
_EXPERT = re.compile(r"(?<=\blocal_experts\.)\d+|(?<=\.weight)\d+$|(?<=\.bias)\d+$")


def name_parameters(model_chunks: Sequence[Any]) -> None:
    """Store on every parameter its name in the whole model."""
    for model in model_chunks:
        if isinstance(model, torch.nn.Module):
            counted = counted_names(model)
            for name, param in model.named_parameters():
                setattr(param, GLOBAL_NAME_ATTRIBUTE, counted[name][0])


def counted_names(model: torch.nn.Module) -> dict[str, tuple[str, str]]:
    """Return each parameter's name in the whole model, and the same with wrappers.

    Keys are names in ``named_parameters``.
    Megatron's layers are numbered over all pipeline stages, its experts over all ranks. An output
    layer that copies a tied embedding has the embedding's name.
    """
    layers: dict[str, str] = {}
    experts: dict[str, Sequence[int] | None] = {"": None}
    modules = dict(model.named_modules())
    for path, module in modules.items():
        above, _, child = path.rpartition(".")
        # Megatron's numbers begin with 1, but those of other modules may begin with 0
        number = getattr(module, "layer_number", None)
        if child.isdigit() and isinstance(number, int) and of_megatron(module):
            layers[path] = str(number - 1)
        if path:
            # what a rank calls expert 0 is another expert on each expert-parallel rank
            experts[path] = experts[above] or getattr(module, "local_expert_indices", None)
    ways = [renamed_paths(modules, layers, with_wrappers=each) for each in (False, True)]
    found = {}
    for name, param in model.named_parameters():
        plain, wrapped = (renamed(name, paths) for paths in ways)
        if (indices := experts[name.rpartition(".")[0]]) is not None:
            plain, wrapped = (_EXPERT.sub(_numbered(indices), each) for each in (plain, wrapped))
        if getattr(param, "shared_embedding", False):
            word = "embedding.word_embeddings.weight"
            plain, wrapped = (_OUTPUT.sub(word, each) for each in (plain, wrapped))
        found[name] = plain, wrapped
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
