"""State as release 0.1.0 wrote it: under other names, and some of it matrix by matrix."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor

from megatron_eopt.checkpoint.keys import matrix_state_key
from megatron_eopt.checkpoint.saved_state import MAINS, Source, Value, Whereabouts, register_form


def kind_of(path: Sequence[str]) -> str:
    """Return the kind of a value that ``path`` leads to, as :func:`keys.kind_of` does now."""
    return ".".join(path)


@register_form
def sources(value: Value) -> Iterator[Source]:
    """Yield where such a checkpoint may have a value that is cut like its parameter."""
    if value.flat is not None and value.kind not in MAINS:
        if value.where.shard is not None:
            yield _of_matrices(value.kind, value.flat, value.where)
        yield _as_one_matrix(value.kind, value.flat, value.where)


def _of_matrices(kind: str, flat: Tensor, where: Whereabouts) -> Source:
    """Return state of each matrix, as optimizers kept it whose state was whole at owners."""
    assert where.shard is not None
    pieces = []
    for matrix, layout in enumerate(where.shard.layouts):
        key = matrix_state_key(kind, f"{where.space.name}.{matrix}")
        for row in layout.piece(where.shard.ranks.rank).table:
            _, top, left, height, width, offset, stride, *_ = row.tolist()
            shape = (height, width)
            view = flat.as_strided(shape, (stride, 1), flat.storage_offset() + offset)
            place, copy = (top, left), where.replica
            pieces.append(
                ShardedTensor(key, view, view.dtype, shape, layout.shape, place, None, copy)
            )
    return Source(tuple(pieces))


def _as_one_matrix(kind: str, flat: Tensor, where: Whereabouts) -> Source:
    """Return state of a whole parameter as of one matrix.

    It was written so without tensor parallelism alone; with it, a part was lost.
    """
    key = matrix_state_key(kind, f"{where.space.name}.0")
    inner = slice(where.space.prepended, None)
    pieces = []
    for box in where.boxes:
        sharded = replace(
            box.sharded,
            local_shape=box.sharded.local_shape[inner],
            global_shape=box.sharded.global_shape[inner],
            global_offset=box.sharded.global_offset[inner],
        )
        view = box.view(flat).view(sharded.local_shape)
        pieces.append(where.piece(replace(box, sharded=sharded), key, view))
    return Source(tuple(pieces))
