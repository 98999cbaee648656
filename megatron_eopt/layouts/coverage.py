"""Checks that layouts cover their matrices: no gap, no unmarked overlap, nothing outside."""

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.layouts.boxes import Boxes, Int64Array, ragged_arange


def check_cover(
    names: Sequence[str], shapes: Sequence[tuple[int, int]], boxes: Boxes, world_size: int
) -> None:
    """Check the layouts of many matrices at once.

    Raises:
        ConfigurationError: Naming the first matrix, rank and range at fault.
    """

    def refuse(boxes: Boxes, box: int, rule: str) -> NoReturn:
        matrix, place = int(boxes.matrix[box]), boxes.offset[box]
        where = (
            f"rows {boxes.row[box]}:{boxes.bottom[box]}, columns {boxes.column[box]}:"
            f"{boxes.right[box]} on rank {boxes.rank[box]} (storage places from {place})"
        )
        rule = f"the piece with {where} of shape {shapes[matrix]} {rule}"
        raise ConfigurationError("layout of", names[matrix], rule, "Mend the pieces")

    rows, cols = np.array(shapes, np.int64).reshape(-1, 2).T
    ranked = (boxes.rank >= 0) & (boxes.rank < world_size)
    inside = (boxes.row >= 0) & (boxes.bottom <= rows[boxes.matrix])
    inside &= (boxes.column >= 0) & (boxes.right <= cols[boxes.matrix])
    stored = (boxes.offset >= 0) & ((boxes.stride >= boxes.width) | (boxes.height == 1))
    for good, rule in (
        (ranked, f"must lie on a rank below {world_size}"),
        (inside, "must lie inside the matrix"),
        (stored, "must lie at places of the storage tensor that do not overlap"),
    ):
        if not good.all():
            refuse(boxes, int(good.argmin()), rule)
    if pair := _overlap(boxes.matrix * world_size + boxes.rank, boxes):
        refuse(boxes, pair[1], "is stored twice by the same rank")
    sources = boxes.take(boxes.source == 1)
    if pair := _overlap(sources.matrix, sources):
        rule = f"must have one source and has two, the other is rank {int(sources.rank[pair[0]])}"
        refuse(sources, pair[1], rule)
    covered = np.zeros(len(names), np.int64)
    np.add.at(covered, sources.matrix, sources.area)
    full = covered == rows * cols
    if not full.all():
        bad = int(full.argmin())
        gap = _first_gap(sources.take(sources.matrix == bad), shapes[bad])
        rule = f"rows and columns {gap} of the {shapes[bad]} matrix have no source on any rank"
        raise ConfigurationError("layout of", names[bad], rule, "Store every element somewhere")


def _overlap(key: Int64Array, boxes: Boxes) -> tuple[int, int] | None:
    """Return two boxes with the same key that share an element, None if there are none."""
    if len(boxes) < 2:
        return None
    order = np.lexsort((boxes.row, key))
    span = int(boxes.bottom.max()) + 1
    begin = key[order] * span + boxes.row[order]
    end = key[order] * span + boxes.bottom[order]
    # of two boxes that share rows the later one begins before the earlier one ends
    place = np.arange(len(order), dtype=np.int64)
    counts = np.searchsorted(begin, end, "left") - place - 1
    first = np.repeat(place, counts)
    second = order[first + 1 + ragged_arange(counts)]
    first = order[first]
    meet = (boxes.column[first] < boxes.right[second]) & (boxes.column[second] < boxes.right[first])
    hits = np.flatnonzero(meet)
    return (int(first[hits[0]]), int(second[hits[0]])) if len(hits) else None


def _first_gap(sources: Boxes, shape: tuple[int, int]) -> str:
    """Describe the first rectangle without a source, for a message."""
    edges = np.unique(np.concatenate([[0, shape[0]], sources.row, sources.bottom]))
    for top, bottom in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        here = sources.take((sources.row <= top) & (sources.bottom >= bottom))
        left = 0
        for column, right in sorted(zip(here.column.tolist(), here.right.tolist(), strict=True)):
            if column > left:
                return f"{top}:{bottom}, {left}:{column}"
            left = max(left, right)
        if left < shape[1]:
            break
    return f"{top}:{bottom}, {left}:{shape[1]}"
