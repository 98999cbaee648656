"""The routers of mixture-of-experts layers, which choose the experts of each token."""

import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from megatron_eopt.base.place import whole_shape
from megatron_eopt.routing.plain_names import origin

_ROUTER = re.compile(r"Router$|TopKGating$|Mo[eE]\w*Gate$")
"""Classes of routers in Megatron, transformers and torchtitan, such as JetMoe's and HunYuan's."""

_EXPERTS = re.compile(r"(\w+_)?experts")
"""What modules call the experts among their children; shared experts have no router."""

EXPERT_COUNTS = ("num_experts", "moe_num_experts", "num_local_experts", "n_experts")
"""What modules of experts, and of mixtures, call the number of their experts."""


def router_weights(modules: Mapping[str, nn.Module]) -> set[int]:
    """Return the ``id`` of each parameter of a router, given a model's ``named_modules``.

    The name of a module's class tells. In other models it is the weight beside experts that has one
    row for each of them.
    """
    found: set[int] = set()
    for module in modules.values():
        cls: Any = origin(module)
        if _is_router(cls):
            found.update(map(id, module.parameters()))
        elif module._modules and (counts := set(_counts_beside(module))):
            found.update(map(id, _rows_for_experts(module, counts)))
    return found


@lru_cache(maxsize=4096)
def _is_router(cls: Any) -> bool:
    return any(_ROUTER.search(base.__name__) for base in cls.__mro__)


def _is_of_experts(name: str) -> bool:
    return "shared" not in name and _EXPERTS.fullmatch(name) is not None


def _counts_beside(module: nn.Module) -> Iterator[int]:
    """Yield how many experts a module has among its children."""
    for name, child in module.named_children():
        if not _is_of_experts(name):
            continue
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield len(child)
        shapes = map(whole_shape, child.parameters())
        yield from (shape[0] for shape in shapes if len(shape) == 3)
        counts = (getattr(item, key, None) for item in (module, child) for key in EXPERT_COUNTS)
        yield from (count for count in counts if isinstance(count, int))


def _rows_for_experts(module: nn.Module, counts: Collection[int]) -> Iterator[Tensor]:
    """Yield the matrices beside experts with as many rows as there are experts.

    Each is a child's only matrix, so that small layers of attention do not count.
    """
    for name, child in module.named_children():
        if "expert" in name:
            continue
        matrices = [param for param in child.parameters() if param.dim() == 2]
        rows = {whole_shape(param)[0] for param in matrices}
        # a parametrized or adapted matrix is several
        if len(rows) == 1 and rows <= set(counts) and 1 not in rows:
            yield from child.parameters()
