"""State as it is written now: in the shape of its unsharded parameter, or of a matrix's own."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor

from megatron_eopt.base.names import STEP
from megatron_eopt.checkpoint.buckets import BucketSpace
from megatron_eopt.checkpoint.keys import kind_of, matrix_state_key
from megatron_eopt.checkpoint.parameter_space import Box, ParameterSpace
from megatron_eopt.checkpoint.saved_state import Source, Value, Whereabouts, kinds_to_read
from megatron_eopt.matrices import matrix_rows
from megatron_eopt.optimizers.driver import Kept
from megatron_eopt.stores.shard import Shard


def stored_values(
    tensors: Mapping[str, Tensor], where: Whereabouts, buckets: BucketSpace | None
) -> Iterator[Value]:
    """Yield main weights and state that are cut like what this rank stores of a parameter."""
    for kind, values in tensors.items():
        flat = values.detach().reshape(-1)
        value = Value(where, kind, where.source(kind, where.boxes, flat), flat)
        yield replace(value, others=partial(_other_sources, value, flat, buckets))


def _other_sources(value: Value, flat: Tensor, buckets: BucketSpace | None) -> Iterator[Source]:
    where = value.where
    for kind, from_adam in kinds_to_read(value.kind).items():
        forms = where.source(kind, where.boxes, flat, from_adam=from_adam).forms()
        # the first one is how it is written
        yield from islice(forms, int(kind == value.kind), None)
    if buckets is not None:
        yield from buckets.sources(value)


def kept_value(kept: Kept, where: Whereabouts) -> Value:
    """Return what a checkpoint holds of a value that is not cut like its parameter."""
    kind = kind_of(kept.path)
    where = replace(where, replica=(*where.replica, int(not kept.writes)))
    if kept.per_element and where.shard is not None:
        boxes = _boxes_of_matrix(kept, where.shard, where.space)
        if boxes:
            own = where.source(kind, boxes, kept.value)
            return Value(where, kind, own, kept=kept, others=lambda: islice(own.forms(), 1, None))
    name = f"{where.space.name}.{kept.matrix}"
    if kept.slab is not None:
        name += ".tp{}of{}".format(*kept.slab)
    piece = _own(matrix_state_key(kind, name), kept, where.replica)
    return Value(where, kind, Source((piece,)), kept=kept)


def count_value(where: Whereabouts, place: str, *, writes: bool) -> Value:
    """Return what a checkpoint holds of a count of steps of one matrix, 0 for a parameter."""
    assert where.state is not None
    key = matrix_state_key(STEP, f"{where.space.name}.{place}")
    replica = (*where.replica, int(not writes))
    piece = ShardedObject(key, int(where.state[STEP]), (1,), (0,), replica_id=replica)
    return Value(where, STEP, Source((piece,)))


def _own(key: str, kept: Kept, replica: tuple[int, ...]) -> ShardedTensor | ShardedObject:
    if not isinstance(kept.value, Tensor):
        return ShardedObject(key, kept.value, (1,), (0,), replica_id=replica)
    # a tensor in a checkpoint has at least one dimension
    data = kept.value.detach()
    data = data.view(data.shape or (1,))
    shape = tuple(data.shape)
    offset = (0,) * data.dim()
    return ShardedTensor(key, data, data.dtype, shape, shape, offset, None, replica)


def _boxes_of_matrix(kept: Kept, shard: Shard, space: ParameterSpace) -> list[Box]:
    """Return the boxes of the unsharded parameter that a matrix is; none if it has no such."""
    base = space.sharded
    shape = tuple(base.global_shape[space.prepended :])
    if len(space.keys) > 1 or shape != (shard.split.shape if len(shape) == 2 else kept.value.shape):
        return []
    ones, before = (1,) * space.prepended, base.global_offset[: space.prepended]
    outer = (kept.value.numel(),) * space.prepended
    if len(shape) != 2:
        offset = (*before, *(0 for _ in shape))
        whole = replace(base, local_shape=(*ones, *shape), global_offset=offset)
        return [Box(whole, 0, (*outer, *kept.value.stride()))]
    cols = shape[1]
    boxes = []
    for first, row, count in matrix_rows(shard.split, 1, 0, -1)[kept.matrix].triples():
        box = replace(base, local_shape=(*ones, count, cols), global_offset=(*before, first, 0))
        boxes.append(Box(box, row * cols, (*outer, cols, 1)))
    return boxes
