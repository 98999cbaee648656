"""Which part of a parameter a plain tensor is, as the code that cut the model declares.

A custom model declares a box. Megatron's weight rematerialization (GTP) declares that consecutive
rows of a tensor-parallel slab are cut evenly over a group, after padding rows at the slab's end.
"""

import sys
from typing import Any, NamedTuple

from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import PLACE_ATTRIBUTE

_EXPERT_SIZE = "get_expert_gtp_weight_remat_world_size"

_PARALLEL_STATE = "megatron.core.parallel_state"
"""The module with the groups of Megatron's models, where somebody has imported it."""


class DeclaredBox(NamedTuple):
    """A box of a whole parameter; ``param.eopt_place = (offset, shape)``."""

    offset: tuple[int, ...]  # index of its first element in the whole parameter
    shape: tuple[int, ...]  # of the whole parameter


def declared_box(param: Tensor, name: str = "parameter") -> DeclaredBox | None:
    """Return the box that a parameter is declared to be, or None.

    Raises:
        ConfigurationError: If the parameter does not fit there.
    """
    declared = getattr(param, PLACE_ATTRIBUTE, None)
    if declared is None:
        return None
    try:
        box = DeclaredBox(*(tuple(map(int, part)) for part in declared))
        ends = zip(box.offset, param.shape, box.shape, strict=True)
        fits = all(0 <= first <= first + size <= whole for first, size, whole in ends)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        rule = f"must be (offset, shape), a box of shape {tuple(param.shape)} in the whole shape"
        hint = "Set it to ((first_row, 0), (rows, columns)) where the parameter is cut"
        raise ConfigurationError(f"{name}.{PLACE_ATTRIBUTE}", declared, rule, hint)
    return box


def is_part(param: Tensor) -> bool:
    """Return whether a plain tensor is declared to be only a box of its parameter."""
    box = declared_box(param)
    return box is not None and box.shape != tuple(param.shape)


def parallel_state() -> Any:
    """Return the module with Megatron's global groups; None if nobody has imported it."""
    return sys.modules.get(_PARALLEL_STATE)


def remat_size(param: Tensor) -> int:
    """Return over how many ranks weight rematerialization cuts the rows of a parameter."""
    if not getattr(param, "is_gtp_weight_remat", False):
        return 1
    size = getattr(param, "gtp_remat_size", None)
    if size is None:
        # megatron-core marks the parameters of experts by `allreduce = False`
        is_dense = getattr(param, "allreduce", True)
        name = "get_gtp_weight_remat_world_size" if is_dense else _EXPERT_SIZE
        state = parallel_state()
        size = 1 if state is None else getattr(state, name)()
    return size or 1


def whole_shape(param: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole parameter of a declared box, or of a tensor-parallel slab."""
    if (box := declared_box(param)) is not None:
        return box.shape
    if (size := remat_size(param)) == 1:
        return tuple(param.shape)
    # padding is at the end of the last ranks' rows, so all ranks together have it once
    return (param.shape[0] * size - getattr(param, "pad_length", 0), *param.shape[1:])


def refuse_part(param: Tensor, name: str) -> None:
    """Raise a ConfigurationError for a part of a parameter, where whole ones are expected."""
    if is_part(param):
        rule = "is only a part of the parameter, which no registered storage takes"
        hint = "Register a storage that calls megatron_eopt.contrib.declared_boxes.build_sharded"
        raise ConfigurationError(f"{name}.{PLACE_ATTRIBUTE}", declared_box(param), rule, hint)
