"""Which module has a parameter, and as which of its tensors, however the module is wrapped.

Wrappers (DDP, torch.compile, activation checkpointing) add components to the paths of modules.
Parametrizations (weight norm, spectral norm) replace a weight by other parameters. Neither changes
what a parameter is for.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

from megatron_eopt.base.place import whole_shape
from megatron_eopt.routing.known_transformers import GATED
from megatron_eopt.routing.plain_names import Paths, joined, of_megatron, origin, paths_of
from megatron_eopt.routing.routers import router_weights

# Parameters that torch's older weight_norm, spectral_norm and pruning put in a weight's place.
_REPLACED = re.compile(r"(.+)_(g|v|orig)")

_WEIGHT = re.compile(r"(.+_)?weight(\d+|_(ih|hh|hr)(_.+)?)?")
"""Names of layers' weights, such as ``weight``, ``weight0``, ``in_proj_weight``, ``weight_ih_l0``.
"""

NO_LAYER = "not the weight of a layer"
"""Why parameters that a module uses in its own way, such as latents, get the scalar optimizer."""

_NORM = re.compile(r"Norm(?!.*(Linear|MLP))")
"""Classes whose weight is a gain for each element, such as Cohere's norms of ``(heads, dim)``."""

# Names under which LoRA adapters (Megatron-Bridge, PEFT) hold the module that they wrap.
_ADAPTED = re.compile(r"\.(to_wrap|base_layer)$")

_OUTPUT = re.compile(r"\boutput_layer\.weight$")
# ``local_experts.3``, and ``weight3`` or ``bias3`` of grouped experts
_EXPERT = re.compile(r"(?<=\blocal_experts\.)\d+|(?<=\.weight)\d+$|(?<=\.bias)\d+$")

_HYPER = re.compile(r"Hyper(Connection|Head)")
"""Classes of hyper-connections, whose projection ``fn`` is no layer of its own."""


@dataclass(frozen=True)
class HeldParameter:
    """A parameter of a module; a parameter that is tied has several."""

    param: nn.Parameter
    chunk: int  # index of the model chunk
    name: str  # of the parameter in its chunk, without wrappers
    global_name: str  # in the whole model, the same at every parallel layout
    wrapped_name: str  # the same with wrappers
    path: str  # of the module, without wrappers
    module: nn.Module  # the layer, not a wrapper or a parametrization
    leaf: str  # name of the tensor that the parameter is, or makes up: "weight"
    is_gain: bool  # whether it only scales the rows or columns of a parametrized tensor
    # the module that has the layer, and its name there; of a parameter without a layer, its own
    owner: nn.Module
    child: str
    of_router: bool  # whether it belongs to a mixture-of-experts router
    of_input: bool  # whether its chunk reads the model's input: a later pipeline stage does not

    @functools.cached_property
    def dims(self) -> int:
        """Number of its dimensions."""
        return self.param.dim()

    @property
    def convolution(self) -> _ConvNd | None:
        """The convolution whose weight this is, or None."""
        is_weight = isinstance(self.module, _ConvNd) and self.leaf == "weight" and not self.is_gain
        return self.module if is_weight else None  # type: ignore[return-value]

    @property
    def is_of_experts(self) -> bool:
        """Whether the module's class or path says that it holds one matrix for each expert."""
        named = "experts" in (*self.path.split("."), self.leaf)
        return named or "Experts" in origin(self.module).__name__

    @property
    def is_stack(self) -> bool:
        """Whether this is one 3-D weight of all experts."""
        shaped = self.dims == 3 and not isinstance(self.module, _ConvNd)
        return shaped and self.is_of_experts

    @property
    def why_vector(self) -> str | None:
        """Why a parameter is not the weight of a layer; None if its module says that it is one."""
        kind = origin(self.module).__name__
        if self.is_gain:
            return "gain of a normalized weight"
        if "bias" in self.leaf:
            return "bias"
        if _NORM.search(kind):
            return "weight of a norm"
        if _WEIGHT.fullmatch(self.leaf):
            has_one = self.dims == 2 and 1 in whole_shape(self.param)
            return "one row or column" if has_one and not of_megatron(self.module) else None
        if _HYPER.search(kind) and self.leaf.endswith("fn"):
            return None
        return None if self.is_of_experts else NO_LAYER


def places_in(model_chunks: Sequence[nn.Module]) -> list[HeldParameter]:
    """Return the places of all parameters of a model, in its order."""
    chunks = ((n, chunk) for n, chunk in enumerate(model_chunks) if isinstance(chunk, nn.Module))
    return [place for number, chunk in chunks for place in ModelWalk(chunk, number).places]


class ModelWalk:
    """What a model chunk has, walked once for all that routing reads.

    Args:
        model: The chunk.
        chunk: Its index.
    """

    def __init__(self, model: nn.Module, chunk: int = 0) -> None:
        self.model, self.chunk = model, chunk
        self.modules = dict(model.named_modules())

    @functools.cached_property
    def _numbers(self) -> tuple[dict[str, str], dict[str, Sequence[int] | None]]:
        return _numbers_in(self.modules)

    @functools.cached_property
    def _paths(self) -> dict[str, Paths]:
        return paths_of(self.modules, self._numbers[0])

    @functools.cached_property
    def paths(self) -> dict[str, str]:
        """The path of each module without wrappers, by its path in ``named_modules``."""
        return {path: own.plain for path, own in self._paths.items()}

    @functools.cached_property
    def places(self) -> list[HeldParameter]:
        """The places of all parameters, in order."""
        return list(_places_in(self.chunk, self.modules, self._paths, self._numbers[1]))


def _places_in(
    chunk: int,
    modules: Mapping[str, nn.Module],
    paths: Mapping[str, Paths],
    experts: Mapping[str, Sequence[int] | None],
) -> Iterator[HeldParameter]:
    # of a wrapper and the module in it, the latter comes last
    by_plain = {paths[path].plain: module for path, module in modules.items()}
    of_routers = router_weights(modules)
    of_input = next((m.pre_process for m in modules.values() if hasattr(m, "pre_process")), True)
    for path, module in modules.items():
        if not module._parameters:
            continue
        own_paths = paths[path]
        host, tensor = path, ""
        if isinstance(module, ParametrizationList):
            host, tensor = _host_of(path)
        # the chunk is its own owner
        above, _, name = _ADAPTED.sub("", paths[host].plain).rpartition(".")
        for leaf, param in module._parameters.items():
            if param is None:
                continue
            whole, gain = (tensor, _is_gain(param, module)) if tensor else _replaced(module, leaf)
            # transformers has gate and up of all experts as a parameter, without a child module
            is_own = whole in GATED
            yield HeldParameter(
                param,
                chunk,
                joined(own_paths.plain, leaf),
                _counted(joined(own_paths.counted, leaf), param, experts[path]),
                _counted(joined(own_paths.wrapped, leaf), param, experts[path]),
                paths[host].plain,
                modules[host],
                whole,
                gain,
                modules[host] if is_own else by_plain[above],
                whole if is_own else name,
                id(param) in of_routers,
                bool(of_input),
            )


def _numbers_in(
    modules: Mapping[str, nn.Module],
) -> tuple[dict[str, str], dict[str, Sequence[int] | None]]:
    """Return the numbers that layers, and the experts in each module, have in the whole model.

    Megatron's layers are numbered over all pipeline stages, its experts over all ranks.
    """
    layers: dict[str, str] = {}
    experts: dict[str, Sequence[int] | None] = {"": None}
    for path, module in modules.items():
        above, _, child = path.rpartition(".")
        # Megatron's numbers begin with 1, but those of other modules may begin with 0
        number = getattr(module, "layer_number", None) if child.isdigit() else None
        if isinstance(number, int) and of_megatron(module):
            layers[path] = str(number - 1)
        if path:
            # what a rank calls expert 0 is another expert on each expert-parallel rank
            experts[path] = experts[above] or vars(module).get("local_expert_indices")
    return layers, experts


def _counted(name: str, param: Tensor, experts: Sequence[int] | None) -> str:
    """Return a parameter's name in the whole model; ``experts`` are the numbers of this rank's.

    An output layer that copies a tied embedding has the embedding's name.
    """
    if experts is not None:
        name = _EXPERT.sub(lambda match: str(experts[int(match[0])]), name)
    if getattr(param, "shared_embedding", False):
        name = _OUTPUT.sub("embedding.word_embeddings.weight", name)
    return name


def _host_of(path: str) -> tuple[str, str]:
    """Return the module that is parametrized at ``path``, and the name of its tensor."""
    above, _, tensor = path.rpartition(".")
    return above.removesuffix("parametrizations").removesuffix("."), tensor


def _is_gain(param: Tensor, originals: nn.Module) -> bool:
    """Whether a parameter is smaller than another of a parametrization, to be broadcast to it."""
    shape = tuple(param.shape)
    for other in originals._parameters.values():
        other_shape = () if other is None else tuple(other.shape)
        if not shape and other_shape:
            return True
        fits = len(shape) == len(other_shape) and all(
            side in (1, other_side) for side, other_side in zip(shape, other_shape, strict=True)
        )
        if fits and shape != other_shape:
            return True
    return False


def _replaced(module: nn.Module, leaf: str) -> tuple[str, bool]:
    """Return the tensor that a parameter of older hooks stands for, and whether it is its gain."""
    match = _REPLACED.fullmatch(leaf)
    # torch's hooks leave a plain attribute of the weight's name, and no parameter
    if match is None or match[1] in module._parameters or not hasattr(module, match[1]):
        return leaf, False
    return match[1], match[2] == "g"


def conv_shape(convolution: _ConvNd, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in which the matrices of a convolution's weight lie: ``(out, all others)``.

    Each group of channels has a matrix of its own, so a grouped convolution is a stack of them. A
    transposed convolution stores its inputs first.
    """
    rest, groups = math.prod(shape[1:]), convolution.groups
    return (shape[0], rest) if groups == 1 else (groups, shape[0] // groups, rest)
