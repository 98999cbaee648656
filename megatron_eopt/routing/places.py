"""Which module has a parameter, and as which of its tensors, however the module is wrapped.

Wrappers (DDP, torch.compile, activation checkpointing) add components to the paths of modules.
Parametrizations (weight norm, spectral norm) replace a weight by other parameters. Neither changes
what a parameter is for.
"""

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

from megatron_eopt.base.place import whole_shape
from megatron_eopt.routing.plain_names import plain_paths

# Parameters that torch's older weight_norm, spectral_norm and pruning put in a weight's place.
_REPLACED = re.compile(r"(.+)_(g|v|orig)")

_WEIGHT = re.compile(r"(.+_)?weight(\d+|_(ih|hh|hr)(_.+)?)?")
"""Names of layers' weights, such as ``weight``, ``weight0``, ``in_proj_weight``, ``weight_ih_l0``.
"""

NO_LAYER = "not the weight of a layer"
"""Why parameters that a module uses in its own way, such as latents, get the scalar optimizer."""

_NORM = re.compile(r"Norm(?!.*(Linear|MLP))")
"""Classes whose weight is a gain for each element, such as Cohere's norms of ``(heads, dim)``."""

_HYPER = re.compile(r"Hyper(Connection|Head)")
"""Classes of hyper-connections, whose projection ``fn`` is no layer of its own."""


@dataclass(frozen=True)
class HeldParameter:
    """A parameter of a module; a parameter that is tied has several."""

    param: nn.Parameter
    name: str  # of the parameter, without wrappers
    path: str  # of the module, without wrappers
    module: nn.Module  # the layer, not a wrapper or a parametrization
    leaf: str  # name of the tensor that the parameter is, or makes up: "weight"
    is_gain: bool  # whether it only scales the rows or columns of a parametrized tensor

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
        shaped = self.param.dim() == 3 and not isinstance(self.module, _ConvNd)
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
            has_one = self.param.dim() == 2 and 1 in whole_shape(self.param)
            return "one row or column" if has_one and not of_megatron(self.module) else None
        if _HYPER.search(kind) and self.leaf.endswith("fn"):
            return None
        return None if self.is_of_experts else NO_LAYER


def of_megatron(module: nn.Module) -> bool:
    """Whether a module's class comes from Megatron or Transformer Engine, or is derived from it."""
    roots = {cls.__module__.partition(".")[0] for cls in origin(module).__mro__}
    return not roots.isdisjoint({"megatron", "transformer_engine"})


def origin(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before wrappers swapped it.

    FSDP, Megatron-FSDP's second version and parametrizations derive a class from it at run time,
    which inherits from the wrapper's own class, too.
    """
    cls = type(module)
    while _is_swapped(cls):
        cls = next(base for base in reversed(cls.__bases__) if issubclass(base, nn.Module))
    return cls


def _is_swapped(cls: type) -> bool:
    """Whether a class is not one that somebody wrote: no module has it, and it computes nothing."""
    home, name = sys.modules.get(cls.__module__), cls.__qualname__
    return "." not in name and "forward" not in vars(cls) and getattr(home, name, None) is not cls


def places_in(model: nn.Module) -> Iterator[HeldParameter]:
    """Yield the places of all parameters of a model, in its order."""
    modules, plain = dict(model.named_modules()), plain_paths(model)
    for path, module in modules.items():
        host, tensor = path, ""
        if isinstance(module, ParametrizationList):
            host, tensor = _host_of(path)
        for leaf, param in module._parameters.items():
            if param is None:
                continue
            name = f"{plain[path]}.{leaf}".lstrip(".")
            if tensor:
                gain = _is_gain(param, module)
                yield HeldParameter(param, name, plain[host], modules[host], tensor, gain)
            else:
                whole, gain = _replaced(module, leaf)
                yield HeldParameter(param, name, plain[path], module, whole, gain)


def _host_of(path: str) -> tuple[str, str]:
    """Return the module that is parametrized at ``path``, and the name of its tensor."""
    above, _, tensor = path.rpartition(".")
    return above.removesuffix("parametrizations").removesuffix("."), tensor


def _is_gain(param: Tensor, originals: nn.Module) -> bool:
    """Whether a parameter is smaller than another of a parametrization, to be broadcast to it."""
    mine = tuple(param.shape)
    for other in originals._parameters.values():
        theirs = () if other is None else tuple(other.shape)
        if not mine and theirs:
            return True
        fits = len(mine) == len(theirs) and all(
            m in (1, t) for m, t in zip(mine, theirs, strict=True)
        )
        if fits and mine != theirs:
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
