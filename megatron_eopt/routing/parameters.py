"""The trainable parameters of a model, with the facts that routing depends on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_eopt.base.names import NO_MUON_ATTRIBUTE, STACK_ATTRIBUTE
from megatron_eopt.base.upstream import needed
from megatron_eopt.routing.global_names import counted_names


@dataclass(frozen=True)
class ModelParameter:
    """One trainable parameter of this rank."""

    name: str  # as ``named_parameters`` of its model chunk gives it
    matched_name: str  # the same with global layer and expert numbers, which overrides match
    chunk: int  # index of its model chunk
    param: torch.nn.Parameter
    is_expert: bool  # whether its gradient is reduced over the expert data-parallel group
    is_embedding: bool  # whether it belongs to an embedding table or the output layer
    is_router: bool  # whether it belongs to a mixture-of-experts router

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard."""
        return tuple(self.param.shape)

    @property
    def has_matrix_shape(self) -> bool:
        """Whether it is 2-D, or 3-D and marked or declared as a stack of matrices."""
        declared = getattr(self.param, "eopt_split", None) is not None
        stack = declared or bool(getattr(self.param, STACK_ATTRIBUTE, False))
        return len(self.shape) == 2 or (len(self.shape) == 3 and stack)

    @property
    def is_excluded(self) -> bool:
        """Whether ``use_muon = False`` on the parameter asks for the scalar optimizer."""
        return getattr(self.param, NO_MUON_ATTRIBUTE, None) is False

    @property
    def why_not_matrix(self) -> str | None:
        """Why an emerging optimizer cannot update this parameter; None if it can."""
        if self.is_embedding:
            return "embedding or output layer"
        if not self.has_matrix_shape:
            return f"{len(self.shape)}-D"
        return None


def cut_dimension(param: torch.Tensor) -> int:
    """Return the dimension that tensor parallelism shards: 0 rows, 1 columns, -1 none.

    This is ``partition_dim``, or -1 if ``tensor_model_parallel`` is False, because Transformer
    Engine sets ``partition_dim`` on duplicated weights too.
    """
    dim = getattr(param, "partition_dim", -1)
    is_cut = dim in (0, 1) and getattr(param, "tensor_model_parallel", True) is not False
    return int(dim) if is_cut else -1


def trainable_parameters(model_chunks: Sequence[torch.nn.Module]) -> list[ModelParameter]:
    """Return every trainable parameter once, in model order; a tied one has its first name."""
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
    """Return the ids of the parameters of each kind of module, in one pass over the model."""
    found: list[set[int]] = [set() for _ in kinds]
    for module in model.modules():
        for types, params in zip(kinds, found, strict=True):
            if isinstance(module, types):
                params.update(id(param) for param in module.parameters(recurse=False))
    return found
