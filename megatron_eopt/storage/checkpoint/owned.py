"""What a checkpoint holds of whole matrices' state at their owners.

State with a number for each of the matrix is saved as part of its parameter's, as a fragment's is.
The rest, such as Kronecker factors, row moments and counters, is saved by matrix.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megatron_eopt.base.names import ELEMENT_WISE_STATE
from megatron_eopt.matrices import matrix_rows
from megatron_eopt.optimizers.stored import StoredParameter
from megatron_eopt.storage.checkpoint.leaves import leaves
from megatron_eopt.storage.checkpoint.model_space import Box, ModelSpace
from megatron_eopt.storage.checkpoint.requests import Rest, Wanted

__all__ = ["OwnedMatrix", "wanted_of"]


@dataclass(frozen=True)
class OwnedMatrix:
    """A whole matrix at its owner.

    Attributes:
        param: The model's parameter that it is part of.
        stored: How the group stores that parameter.
        tensor_rank: This rank's tensor-parallel coordinate.
        index: Its place among the parameter's matrices.
        matrix: Its values.
        state: The optimizer's state of it.
        group: The parameter group that the optimizer steps it in.
        counters: Names of what the optimizer itself keeps in that group.
    """

    param: Tensor
    stored: StoredParameter
    tensor_rank: int
    index: int
    matrix: Tensor
    state: dict[str, Any]
    group: dict[str, Any]
    counters: tuple[str, ...]


def wanted_of(owned: OwnedMatrix, spaces: Mapping[Tensor, ModelSpace]) -> Wanted:
    """Return what a checkpoint holds of a matrix's state."""
    space = spaces[owned.param]
    boxes = list(_boxes(owned, space))
    alike: dict[str, Tensor] = {}
    others: dict[str, tuple[dict[str, Any], str, Any]] = {}
    for path, leaf in leaves(owned.state):
        kind = path.replace("/", ".")
        if boxes and kind in ELEMENT_WISE_STATE and leaf.shape == owned.matrix.shape:
            alike[kind] = leaf
        else:
            others[kind] = owned.state, path, leaf
    for path, leaf in leaves({name: owned.group[name] for name in owned.counters}):
        others[f"group.{path.replace('/', '.')}"] = owned.group, path, leaf
    return Wanted(space, boxes, alike, rest=Rest(f"{space.name}.{owned.index}", others))


def _boxes(owned: OwnedMatrix, space: ModelSpace) -> Iterator[Box]:
    """Yield the boxes of the unsharded parameter that are the matrix; none if it has no such."""
    shape = tuple(owned.param.shape)
    cut = owned.stored.partition_dim if owned.stored.tp_size > 1 else -1
    base = space.sharded
    is_matrix = len(shape) == 2
    is_whole = cut == -1 and len(owned.stored.split.matrices) == 1
    if len(space.keys) > 1 or not (is_matrix or is_whole):
        return
    before = base.global_offset[: space.prepended]
    # where the parameter starts in the checkpoint's tensor: this rank's box minus its share
    origin = [
        offset - (owned.tensor_rank * size if dim == cut else 0)
        for dim, (offset, size) in enumerate(
            zip(
                base.global_offset[space.prepended :],
                base.local_shape[space.prepended :],
                strict=True,
            )
        )
    ]
    ones = (1,) * space.prepended
    if not is_matrix:
        strides = owned.matrix.contiguous().stride()
        whole = replace(base, local_shape=(*ones, *shape), global_offset=(*before, *origin))
        yield Box(whole, 0, (*(owned.matrix.numel() for _ in ones), *strides))
        return
    cols = owned.matrix.shape[-1]
    runs = matrix_rows(owned.stored.split, 1, 0, -1)[owned.index]
    for first, row, count in runs.triples():
        offset = (*before, origin[0] + first, origin[1] + runs.first_col)
        box = replace(base, local_shape=(*ones, count, cols), global_offset=offset)
        yield Box(box, row * cols, (*(owned.matrix.numel() for _ in ones), cols, 1))
