"""What a model's parameters are, as far as routing cares."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_eopt.base.names import NO_MUON_ATTRIBUTE, STACK_ATTRIBUTE
from megatron_eopt.base.upstream import needed
from megatron_eopt.routing.global_names import counted_names


@dataclass(frozen=True)
class ModelParameter:
    """One trainable parameter of this rank."""

    name: str  # its name in its model chunk, as ``named_parameters`` gives it
    matched_name: str  # the same with layers and experts counted over all ranks
    chunk: int  # index of that chunk
    param: torch.nn.Parameter  # the parameter
    is_expert: bool  # whether its gradient is reduced over expert data parallelism
    # whether it is the weight of an embedding table (words, positions, token types) or of the
    # output layer
    is_embedding: bool
    is_router: bool  # whether it is the weight of a mixture-of-experts router

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return tuple(self.param.shape)

    @property
    def has_matrix_shape(self) -> bool:
        """Whether it is a matrix, or marked or declared as a stack of matrices, by its shape."""
        declared = getattr(self.param, "eopt_split", None) is not None
        stack = declared or bool(getattr(self.param, STACK_ATTRIBUTE, False))
        return len(self.shape) == 2 or (len(self.shape) == 3 and stack)

    @property
    def is_excluded(self) -> bool:
        """Whether its module, or the user, has marked it as none for an emerging optimizer."""
        return getattr(self.param, NO_MUON_ATTRIBUTE, None) is False

    @property
    def why_not_matrix(self) -> str | None:
        """Why this parameter is no matrix that an emerging optimizer could take; None if it is."""
        if self.is_embedding:
            return "embedding or output layer"
        if not self.has_matrix_shape:
            return f"{len(self.shape)}-D"
        return None


def cut_dimension(param: torch.Tensor) -> int:
    """Return which dimension tensor parallelism cuts: 0 the rows, 1 the columns, -1 none.

    ``partition_dim`` says so. Where ``tensor_model_parallel`` is False nothing is cut all the same:
    Transformer Engine sets the dimension on duplicated weights, too.
    """
    dim = getattr(param, "partition_dim", -1)
    is_cut = dim in (0, 1) and getattr(param, "tensor_model_parallel", True) is not False
    return int(dim) if is_cut else -1


def trainable_parameters(model_chunks: Sequence[torch.nn.Module]) -> list[ModelParameter]:
    """Return every trainable parameter once, in model order; tied ones under their first name."""
    found: dict[int, ModelParameter] = {}
    for chunk, model in enumerate(model_chunks):
        tables = (torch.nn.Embedding, needed("VocabParallelEmbedding"))
        embeddings, routers = _weights_of(model, tables, (needed("Router"),))
        counted = counted_names(model)
        for name, param in model.named_parameters():
            if not param.requires_grad or id(param) in found:
                continue
            found[id(param)] = ModelParameter(
                name=name,
                matched_name=counted[name],
                chunk=chunk,
                param=param,
                is_expert=not getattr(param, "allreduce", True),
                is_embedding=id(param) in embeddings
                or bool(getattr(param, "is_embedding_or_output_parameter", False)),
                is_router=id(param) in routers,
            )
    return list(found.values())


def _weights_of(model: torch.nn.Module, *kinds: tuple[type, ...]) -> list[set[int]]:
    """Return the parameters of modules of each kind, from one pass over the model."""
    found: list[set[int]] = [set() for _ in kinds]
    for module in model.modules():
        for types, params in zip(kinds, found, strict=True):
            if isinstance(module, types):
                params.update(id(param) for param in module.parameters(recurse=False))
    return found
