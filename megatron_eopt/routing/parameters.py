"""The trainable parameters of a model, with the facts that routing depends on."""

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.nn.modules.conv import _ConvNd

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import NO_MUON_ATTRIBUTE, OUTPUT_ATTRIBUTE, STACK_ATTRIBUTE
from megatron_eopt.base.place import whole_shape
from megatron_eopt.routing.places import HeldParameter
from megatron_eopt.routing.plain_names import is_a, tensor_name

INPUT_LAYER = "input layer"
"""Why a convolution that reads a model's input is updated by the scalar optimizer."""


@dataclass(frozen=True)
class ModelParameter:
    """One trainable parameter of this rank."""

    name: str  # in its model chunk, without wrappers
    # what overrides match: its name in the whole model, the same with wrappers, and that of the
    # tensor that it parametrizes
    matched_names: tuple[str, ...]
    of_own_module: bool  # whether the model itself, not a wrapper, has a module called ``module``
    chunk: int  # index of its model chunk
    param: torch.nn.Parameter
    is_expert: bool  # whether its gradient is reduced over the expert data-parallel group
    is_embedding: bool  # whether it belongs to an embedding table or the output layer
    is_router: bool  # whether it belongs to a mixture-of-experts router
    is_stack: bool = False  # whether it is 3-D and holds one matrix for each expert
    why_vector: str | None = None  # why its module says that it is not a layer's weight
    convolution: _ConvNd | None = None  # the convolution whose weight it is
    is_input: bool = False  # whether it is the weight of the model's first layer

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of this rank's tensor-parallel shard; unsharded if plain tensors have a place."""
        return whole_shape(self.param)

    @property
    def is_declared(self) -> bool:
        """Whether attributes of the parameter say that it consists of matrices."""
        split = getattr(self.param, "eopt_split", None)
        return split is not None or getattr(self.param, NO_MUON_ATTRIBUTE, None) is True

    @property
    def has_matrix_shape(self) -> bool:
        """Whether it is 2-D, a convolution's weight, or holds declared or experts' matrices."""
        count = len(self.shape)
        stack = self.is_stack or bool(getattr(self.param, STACK_ATTRIBUTE, False))
        declared = getattr(self.param, "eopt_split", None) is not None
        return (
            count == 2 or (count == 3 and stack) or (count > 1 and declared) or self.is_convolution
        )

    @property
    def is_convolution(self) -> bool:
        """Whether it is a convolution's weight, which becomes a matrix if it is flattened."""
        return self.convolution is not None

    @property
    def is_excluded(self) -> bool:
        """Whether ``use_muon = False`` on the parameter asks for the scalar optimizer."""
        return getattr(self.param, NO_MUON_ATTRIBUTE, None) is False

    def why_not_matrix(self, *, by_module: bool = True, convolutions: bool = False) -> str | None:
        """Return why an emerging optimizer does not update this parameter; None if it does.

        Args:
            by_module: Whether the module tells what is not a layer's weight; otherwise every 2-D
                parameter is one.
            convolutions: Whether convolutions are flattened to matrices.
        """
        if self.is_embedding:
            return "embedding or output layer"
        if self.param.is_complex():
            return "complex numbers"
        why_vector = self.why_vector if by_module else None
        if not self.has_matrix_shape:
            return why_vector or f"{len(self.shape)}-D"
        if self.is_declared:
            return None
        if self.convolution is not None:
            if not convolutions:
                return f"{len(self.shape)}-D"
            depthwise = 1 < self.convolution.groups == self.shape[0]
            if depthwise:
                return "depthwise convolution"
            return INPUT_LAYER if self.is_input else None
        return why_vector


def cut_dimension(param: torch.Tensor) -> int:
    """Return the dimension that tensor parallelism shards: 0 rows, 1 columns, -1 none.

    This is ``partition_dim``, or -1 if ``tensor_model_parallel`` is False, because Transformer
    Engine sets ``partition_dim`` on duplicated weights too.
    """
    dim = getattr(param, "partition_dim", -1)
    is_cut = dim in (0, 1) and getattr(param, "tensor_model_parallel", True) is not False
    return int(dim) if is_cut else -1


def trainable_parameters(
    places: Iterable[HeldParameter],
    outputs: Collection[torch.nn.Parameter] = (),
    *,
    stacks: bool = False,
) -> list[ModelParameter]:
    """Return every trainable parameter once, in model order; a tied one has its first name.

    Args:
        places: Where the model has its parameters.
        outputs: Parameters of output layers, besides those that have megatron-core's mark.
        stacks: Whether modules may say that a 3-D weight is a stack of matrices.
    """
    by_param: dict[int, list[HeldParameter]] = {}
    # chunks that have a module called ``module`` themselves
    with_own: set[int] = set()
    for place in places:
        by_param.setdefault(id(place.param), []).append(place)
        if place.name.startswith("module."):
            with_own.add(place.chunk)
    of_outputs = {id(param) for param in outputs}
    why_vectors: dict[int, str | None] = {}
    layers: dict[int, list[int]] = {}  # the layers' weights in each chunk that reads the input
    for key, uses in by_param.items():
        is_matrix = uses[0].dims > 1
        # a tied weight is a layer's if one of its layers uses it so
        reasons = [place.why_vector for place in uses] if is_matrix else [None]
        why_vectors[key] = reasons[0] if all(reasons) else None
        if is_matrix and uses[0].of_input and why_vectors[key] is None:
            layers.setdefault(uses[0].chunk, []).append(key)
    parameters = []
    for key, uses in by_param.items():
        first, param = uses[0], uses[0].param
        if not param.requires_grad:
            continue
        marked = id(param) in of_outputs or bool(getattr(param, OUTPUT_ATTRIBUTE, False))
        its_layers = layers.get(first.chunk, ())
        names = (first.global_name, first.wrapped_name, tensor_name(first.global_name))
        parameter = ModelParameter(
            name=first.name,
            matched_names=tuple(dict.fromkeys(names)),
            of_own_module=first.chunk in with_own,
            chunk=first.chunk,
            param=param,
            is_expert=not getattr(param, "allreduce", True),
            is_embedding=marked or any(is_table(place.module) for place in uses),
            is_router=any(place.of_router for place in uses),
            is_stack=stacks and any(place.is_stack for place in uses),
            why_vector=why_vectors[key],
            convolution=next(filter(None, [place.convolution for place in uses]), None),
            is_input=len(its_layers) > 1 and its_layers[0] == key,
        )
        parameters.append(parameter)
    return parameters


def check_dtypes(names: Mapping[torch.Tensor, str], what: str, *, double: bool = False) -> None:
    """Raise for the first parameter that a step would round to float32, or cut to its real part.

    Args:
        names: The parameters, with their names.
        what: StoredWeights or optimizer, for the message.
        double: Whether float64 is kept.
    """
    for param, name in names.items():
        dtype = param.dtype
        if dtype.is_complex:
            rule = f"{what} does not update complex numbers"
            hint = "Store torch.view_as_real of it, or use build_optimizer in your own loop"
        elif dtype == torch.float64 and not double:
            rule = f"{what} computes in float32, which would round it in each step"
            hint = "Convert it to float32"
        else:
            continue
        raise ConfigurationError(name, dtype, rule, hint)


def is_table(module: torch.nn.Module) -> bool:
    """Whether a module is an embedding table."""
    is_torchs = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
    return is_torchs or is_a(module, "megatron", "VocabParallelEmbedding")
