"""What a model's parameters are, as far as routing cares."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_eopt.base.names import NO_MUON_ATTRIBUTE, STACK_ATTRIBUTE
from megatron_eopt.base.versions import megatron_name


@dataclass(frozen=True)
class ModelParameter:
    """One trainable parameter of this rank.

    Attributes:
        name: Its name in its model chunk, as ``named_parameters`` gives it.
        chunk: Index of that chunk.
        order: Its place among this rank's parameters.
        param: The parameter.
        is_expert: Whether its gradient is reduced over expert data parallelism.
        is_embedding: Whether it is the weight of an embedding table (words, positions, token types)
            or of the output layer.
        is_router: Whether it is the weight of a mixture-of-experts router.
    """

    name: str
    chunk: int
    order: int
    param: torch.nn.Parameter
    is_expert: bool
    is_embedding: bool
    is_router: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return tuple(self.param.shape)

    @property
    def has_matrix_shape(self) -> bool:
        """Whether it is a matrix, or marked as a stack of matrices, by its shape."""
        stack = len(self.shape) == 3 and getattr(self.param, STACK_ATTRIBUTE, False)
        return len(self.shape) == 2 or bool(stack)

    @property
    def why_not_matrix(self) -> str | None:
        """Why this parameter is no matrix that an emerging optimizer could take; None if it is."""
        if getattr(self.param, NO_MUON_ATTRIBUTE, None) is False:
            return f"{NO_MUON_ATTRIBUTE}=False"
        if self.is_embedding:
            return "embedding or output layer"
        if not self.has_matrix_shape:
            return f"{len(self.shape)}-D"
        return None


def trainable_parameters(model_chunks: Sequence[torch.nn.Module]) -> list[ModelParameter]:
    """Return every trainable parameter once, in model order; tied ones under their first name."""
    return list(_walk(model_chunks))


def _walk(model_chunks: Sequence[torch.nn.Module]) -> Iterator[ModelParameter]:
    seen: set[int] = set()
    for chunk, model in enumerate(model_chunks):
        embeddings = _weights_of(
            model, (torch.nn.Embedding, megatron_name("VocabParallelEmbedding"))
        )
        routers = _weights_of(model, (megatron_name("Router"),))
        for name, param in model.named_parameters():
            if not param.requires_grad or id(param) in seen:
                continue
            seen.add(id(param))
            yield ModelParameter(
                name=name,
                chunk=chunk,
                order=len(seen),
                param=param,
                is_expert=not getattr(param, "allreduce", True),
                is_embedding=id(param) in embeddings
                or bool(getattr(param, "is_embedding_or_output_parameter", False)),
                is_router=id(param) in routers,
            )


def _weights_of(model: torch.nn.Module, kinds: tuple[type, ...]) -> set[int]:
    modules = (module for module in model.modules() if isinstance(module, kinds))
    return {id(p) for module in modules for p in module.parameters(recurse=False)}
