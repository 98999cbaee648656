"""The output layers of a model that is not Megatron's, found by names and shapes."""

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.routing.parameters import is_table
from megatron_eopt.routing.places import ModelWalk

OUTPUT_LAYERS = ("lm_head", "*.lm_head", "output", "output_layer", "*.output_layer", "embed_out")
"""Shell-style patterns of the usual module paths of output layers."""

_OF_MODELS = frozenset({"output", "embed_out"})
"""Names that hidden layers have too: output layers only right inside a language model."""

_HEAD = re.compile(
    r"(?!pre_|conv_)(.+_)?(heads?|classifier|score|logits|predictions?)|head_dist|cls|qa_outputs"
    r"|final_layer|proj_out(_\d)?|conv_out|(class|bbox|box|span)_(embed|predictor)"
)
"""Names of modules that are heads: of classifiers, of rewards and values, of image models."""

_LAST = re.compile(r"fc|output|projection|to_(logits|pixels)|last_linear")
"""Names that heads have, but hidden layers too: only the last linear layer is one."""

_FEW = 4  # an output layer has fewer rows than columns by this factor
_BOX = 4  # most rows of a layer that is an output wherever it is: a box has four


def output_layers(walk: ModelWalk, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the output layers of a model by their paths without wrappers.

    A pattern may match the path that ``named_modules`` gives, or the path without wrappers such as
    DDP, torch.compile or a module that only contains the model.

    Raises:
        ConfigurationError: If patterns other than the default ones match no module.
    """
    paths, modules = walk.paths, walk.modules
    root = _innermost(walk.model, paths)
    usual = tuple(patterns) == OUTPUT_LAYERS
    holders = _holders_of_tables(walk) if usual else set[str]()
    layers = {}
    # of a wrapper and the module in it, the latter comes last
    for path, module in modules.items():
        plain = paths[path]
        inner = plain.removeprefix(root).lstrip(".") if plain.startswith(root) else plain
        above, _, name = plain.rpartition(".")
        of_model = usual and name in _OF_MODELS and above in holders
        names = {path, plain, inner}
        if of_model or any(fnmatch.fnmatchcase(n, p) for n in names for p in patterns):
            layers[plain] = module
    if not layers and patterns and not usual:
        rule = "none of these patterns matches the path of a module"
        hint = "Pass the path of the output layer, as model.named_modules() gives it"
        linear = [plain for path, plain in paths.items() if isinstance(modules[path], nn.Linear)]
        named = [plain for plain in linear if _HEAD.fullmatch(plain.rpartition(".")[2])]
        if alike := named[:8] or linear[-1:]:
            hint += f", such as {', '.join(map(repr, alike))}"
        raise ConfigurationError("output_layers", patterns, rule, hint)
    return layers


def _innermost(model: nn.Module, paths: dict[str, str]) -> str:
    """Return the path, without wrappers, of the first module that has more than one child."""
    path, module = "", model
    while True:
        used = [
            (name, child)
            for name, child in module.named_children()
            if next(child.parameters(), None) is not None
        ]
        is_wrapper = len(used) == 1 and not module._parameters
        if not is_wrapper or not any(True for _ in used[0][1].children()):
            return paths[path]
        name, module = used[0]
        path = f"{path}.{name}".lstrip(".")


def _holders_of_tables(walk: ModelWalk) -> set[str]:
    """Return the paths of modules that contain an embedding table, so are whole models."""
    holders = set()
    for path, module in walk.modules.items():
        if is_table(module):
            above = walk.paths[path]
            while above:
                above = above.rpartition(".")[0]
                holders.add(above)
    return holders


def likely_heads(walk: ModelWalk, known: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return modules that look like output layers, but are not among the ``known`` ones, by path.

    Known names tell, outside of repeated layers. So do at most four rows there. Without a known or
    tied output layer, the last linear layer is one if it ends an ``nn.Sequential`` that is the
    whole model, or by its shape: few rows, or those of the largest table.
    """
    modules, paths = walk.modules, walk.paths
    embeddings = [module for module in modules.values() if isinstance(module, nn.Embedding)]
    largest = max((m.num_embeddings, m.embedding_dim) for m in embeddings) if embeddings else None
    linears = {path: module for path, module in modules.items() if isinstance(module, nn.Linear)}
    tied = {id(param) for module in embeddings for param in module.parameters()}
    has_output = bool(known) or any(map(_has(tied), linears.values()))
    done = _has(tied | {id(param) for module in known.values() for param in module.parameters()})
    # the last linear layer is a head only if another layer is before it
    layers = sum(isinstance(module, nn.Linear | _ConvNd) for module in modules.values())
    last = next(reversed(linears), None) if layers > 1 else None
    heads: dict[str, None] = {}
    for path, module in modules.items():
        if not isinstance(module, nn.Linear | _ConvNd) or done(module):
            continue
        every = paths[path].split(".")
        # a component that is a number belongs to repeated layers, unless it ends the path
        words = every[: next((n for n, word in enumerate(every) if word.isdigit()), len(every))]
        depth = next((n for n, word in enumerate(words) if _HEAD.fullmatch(word)), None)
        is_outside = len(every) - len(words) < 2
        ends_here = path == last and is_outside
        by_name = ends_here and _LAST.fullmatch(every[-1])
        is_last = ends_here and not has_output
        is_whole = all(map(str.isdigit, every))  # the whole model is an nn.Sequential
        by_shape = is_last and (is_whole or _is_output_like(module, largest))
        is_box = is_outside and path in linears and _is_box(module)
        if depth is not None:
            heads.setdefault(".".join(words[: depth + 1]), None)
        elif by_name or by_shape or is_box:
            heads.setdefault(paths[path], None)
    by_plain = {paths[path]: module for path, module in modules.items()}
    return {path: by_plain[path] for path in heads}


def _has(params: Collection[int]) -> Callable[[nn.Module], bool]:
    """Return a function that tells whether a module has one of these parameters, given by id."""

    def has(module: nn.Module) -> bool:
        # a layer's own, unless it is parametrized
        own: Iterable[Any] = module._parameters.values()
        return any(
            id(param) in params for param in (module.parameters() if module._modules else own)
        )

    return has


def _has_few(linear: Any) -> bool:
    return bool(linear.out_features * _FEW <= linear.in_features)


def _is_box(linear: Any) -> bool:
    return _has_few(linear) and linear.out_features <= _BOX


def _is_output_like(linear: Any, table: tuple[int, int] | None) -> bool:
    return _has_few(linear) or (linear.out_features, linear.in_features) == table
