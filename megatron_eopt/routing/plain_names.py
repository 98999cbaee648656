"""Names in the user's model, without the components that wrappers add to them.

A wrapper (DDP, FSDP, torch.compile, activation checkpointing, 16-bit weights) holds the user's
module as a child of its own. Without the child's name, a parameter is called the same however its
model is wrapped, as in torch's distributed checkpoints.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

_PRIVATE = frozenset(
    {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"}
)
"""What wrappers of torch and Lightning call the module that they hold."""

_HOLD_MODULE = frozenset(
    {"DistributedDataParallel", "DataParallel", "DeepSpeedEngine"}
    | {"_BaseDataParallel", "Float16Module", "MegatronFSDP"}
)
"""Classes of wrappers that call it ``module``, as users may call a module of their own."""

_ADDED = re.compile(rf"(?<!\w)(?:{'|'.join(_PRIVATE)}|module)\.")

_PARAMETRIZED = re.compile(r"(?<!\w)parametrizations\.(\w+)\.original$")


class Paths(NamedTuple):
    """The path of a module, as seen from several sides."""

    plain: str  # without the components of wrappers
    counted: str  # the same in the whole model: with other words, such as numbers of layers
    wrapped: str  # the latter with the components of wrappers


def plain_paths(model: nn.Module) -> dict[str, str]:
    """Return the path of each module without wrappers, by its path in ``named_modules``."""
    paths = paths_of(dict(model.named_modules()))
    return {path: own.plain for path, own in paths.items()}


def plain_names(model: nn.Module) -> dict[str, str]:
    """Return the name of each parameter without wrappers, by its name in ``named_parameters``."""
    paths = plain_paths(model)
    split = ((name, *name.rpartition(".")) for name, _ in model.named_parameters())
    return {name: joined(paths[above], leaf) for name, above, _, leaf in split}


def paths_of(
    modules: Mapping[str, nn.Module], words: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Paths]:
    """Return the paths of each module, by its path.

    Args:
        modules: The model's ``named_modules``.
        words: What replaces the last component of some paths in the whole model.
    """
    paths = {"": Paths("", "", "")}
    for path in modules:
        above, _, child = path.rpartition(".")
        if not path:
            continue
        plain, counted, wrapped = paths[above]
        word = words.get(path, child)
        if not _holds(modules[above], child):
            plain, counted = joined(plain, child), joined(counted, word)
        paths[path] = Paths(plain, counted, joined(wrapped, word))
    return paths


def joined(above: str, leaf: str) -> str:
    """Return the path of a child, or of a parameter, in a module at the path ``above``."""
    return f"{above}.{leaf}" if above else leaf


def _holds(module: nn.Module, child: str) -> bool:
    """Return whether a module is a wrapper that holds the user's as this child."""
    if child != "module":
        return child in _PRIVATE
    return not _HOLD_MODULE.isdisjoint(cls.__name__ for cls in type(module).__mro__)


def of_megatron(module: nn.Module) -> bool:
    """Whether a module's class comes from Megatron or Transformer Engine, or is derived from it."""
    cls: Any = origin(module)
    return bool(_classes_of(cls, "megatron") or _classes_of(cls, "transformer_engine"))


def is_a(module: nn.Module, package: str, *names: str) -> bool:
    """Whether a module's class, or one that it is derived from, has one of these names there.

    Args:
        module: The module.
        package: The root of the package that defines the class; it need not be installed.
        names: Names of classes.
    """
    cls: Any = type(module)
    return not _classes_of(cls, package).isdisjoint(names)


@lru_cache(maxsize=4096)
def _classes_of(cls: Any, package: str) -> frozenset[str]:
    """Return the names of a class and of those that it is derived from, if a package has them."""
    found = (base for base in cls.__mro__ if base.__module__.partition(".")[0] == package)
    return frozenset(base.__name__ for base in found)


def origin(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before wrappers swapped it.

    FSDP, Megatron-FSDP's second version and parametrizations derive a class from it at run time,
    which inherits from the wrapper's own class, too.
    """
    cls: Any = type(module)
    return _origin_of(cls)


@lru_cache(maxsize=1024)
def _origin_of(cls: Any) -> type[nn.Module]:
    # a class that nobody wrote: no module has it, and it computes nothing
    while "." not in cls.__qualname__ and "forward" not in vars(cls):
        if getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls:
            break
        cls = next(base for base in reversed(cls.__bases__) if issubclass(base, nn.Module))
    origin: type[nn.Module] = cls
    return origin


def tensor_name(name: str) -> str:
    """Return the name of the tensor that a parameter is, or alone parametrizes."""
    return _PARAMETRIZED.sub(r"\1", name) if "parametrizations." in name else name


@lru_cache(maxsize=1024)
def plain_pattern(pattern: str, *, has_module: bool) -> str:
    """Return a pattern of names without the wrappers that it names.

    With ``has_module``, the model has a module that is called ``module`` itself.
    """
    plain = re.sub(rf"(?<!\w)(?:{'|'.join(_PRIVATE)})\.", "", pattern)
    return plain if has_module else re.sub(r"^(module\.)+", "", plain)


def bare(name: str) -> str:
    """Return a name, or a key with one, without any component that may be a wrapper's.

    It does not tell a wrapper's ``module`` from a user's, so compare results only with each other.
    """
    return _ADDED.sub("", name)


def match_names(wanted: Iterable[str], given: Iterable[str]) -> dict[str, str]:
    """Return the name in ``given`` of each wanted one that is there, however both were wrapped."""
    names, given_names = list(wanted), set(given)
    matches = {name: name for name in names if name in given_names}
    left = Counter(bare(name) for name in names if name not in matches)
    others: dict[str, list[str]] = {}
    for name in given_names.difference(matches):
        others.setdefault(bare(name), []).append(name)
    for name in names:
        candidates = others.get(bare(name), ())
        if name not in matches and left[bare(name)] == len(candidates) == 1:
            matches[name] = candidates[0]
    return matches
