"""Boxes against lists of their elements."""

from itertools import product

import numpy as np
import pytest

from megatron_eopt.layouts import boxes as module
from megatron_eopt.layouts.boxes import Box, Boxes, cut, matching, ragged_arange, weights_of

RNG = np.random.default_rng(0)
COLUMNS = "rank row column height width offset stride source matrix tensor".split()


def elements(box):
    """Return the indices of a box's elements."""
    sides = zip(box.offset, box.shape, strict=True)
    return list(product(*(range(first, first + size) for first, size in sides)))


def views():
    """Return sizes and strides of views with gaps, of up to three dimensions."""
    yield (), ()
    for _ in range(150):
        sizes = tuple(RNG.integers(1, 5, RNG.integers(1, 4)).tolist())
        strides, extent = [], 1
        for size in reversed(sizes):
            strides.insert(0, extent + int(RNG.choice([0, 0, 1, 2])))
            extent += (size - 1) * strides[0]
        yield sizes, tuple(strides)


def test_a_range_of_a_strided_view_is_a_few_boxes():
    for sizes, strides in views():
        at = {index: int(np.dot(index, strides) if index else 0) for index in np.ndindex(sizes)}
        last = max(at.values()) + 2
        for start, stop in product(range(-2, last, 1 + last // 8), range(-2, last + 1)):
            boxes = list(cut(sizes, strides, start, stop))
            found = sorted(index for box in boxes for index in elements(box))
            assert found == [index for index, place in at.items() if start <= place < stop]
            assert all(min(box.shape, default=1) for box in boxes)
            # the part of the first row, whole rows, and the part of the last row
            assert len(boxes) <= max(1, 2 * len(sizes) - 1), (sizes, strides, start, stop)
    assert list(cut((2, 0), (2, 1), 0, 9)) == []


def test_the_part_of_a_box_that_is_in_another():
    for count in (1, 2, 3):
        for _ in range(100):
            one, other = (
                Box(*(tuple(RNG.integers(low, 4, count).tolist()) for low in (0, 1)))
                for _ in range(2)
            )
            part, common = one.clip(other), {*elements(one)} & {*elements(other)}
            assert {*(elements(part) if part else ())} == common
            assert (part is None) == (not common)
    assert Box((), ()).clip(Box((), ())) == Box((), ())


def places(boxes):
    """Return the matrix elements of each box, with the storage offset of each."""
    return [
        {(row + i, column + j): offset + i * stride + j for i, j in np.ndindex(height, width)}
        for _, row, column, height, width, offset, stride, *_ in boxes.table.tolist()
    ]


def random_boxes(count):
    least = [[0], [0], [1], [1], [0], [0]]
    row, column, height, width, offset, gap = RNG.integers(least, 5, (6, count))
    place = {"corner": (row, column), "size": (height, width), "offset": offset}
    return Boxes.make(rank=RNG.integers(0, 4, count), **place, stride=width + gap)


def test_boxes_are_clipped_where_they_are_stored():
    one, other = random_boxes(300), random_boxes(300)
    clipped = one.clip(other)
    for part, whole, bound in zip(*map(places, (clipped, one, other)), strict=True):
        assert part == {index: place for index, place in whole.items() if index in bound}
    assert (clipped.rank == one.rank).all()
    assert clipped.height.min() == clipped.width.min() == 0


def test_numbers_of_boxes():
    boxes = random_boxes(50)
    its = places(boxes)
    assert boxes.area.tolist() == [len(each) for each in its]
    assert boxes.extent.tolist() == [max(each.values()) + 1 for each in its]
    assert boxes.bottom.tolist() == [max(row for row, _ in each) + 1 for each in its]
    assert boxes.right.tolist() == [max(column for _, column in each) + 1 for each in its]
    held = [sum(len(e) for e, r in zip(its, boxes.rank, strict=True) if r == n) for n in range(5)]
    assert boxes.held(5).tolist() == held
    assert boxes.held(5).dtype == np.int64
    assert len(boxes) == 50


def test_weights_of_boxes_are_those_of_their_elements():
    size = (10, 10)
    of_each = np.array([weights_of(np.array(at), np.array(at) + 1) for at in np.ndindex(size)])
    assert len(np.unique(of_each)) == len(of_each)
    boxes = random_boxes(50)
    for weight, its in zip(boxes.weights, places(boxes), strict=True):
        assert weight == np.array([of_each.reshape(size)[at] for at in its]).sum()
    assert weights_of(np.zeros(2, np.int64), np.array(size)) == of_each.sum()


def test_empty_boxes_are_dropped_and_numbers_broadcast():
    boxes = Boxes.make(
        rank=[0, 1, 2, 3], corner=(0, 1), size=([0, 1, 2, 2], [1, 1, 0, 2]), offset=3, stride=7
    )
    assert boxes.table.tolist() == [[1, 0, 1, 1, 1, 3, 7, 1, 0, 0], [3, 0, 1, 2, 2, 3, 7, 1, 0, 0]]
    received = Boxes.make(rank=0, corner=(0, 0), size=(1, 1), offset=0, stride=1, source=0)
    assert received.source.tolist() == [0]
    joined = Boxes.join([boxes, received])
    assert joined.rank.tolist() == [1, 3, 0]
    assert Boxes.join([]).table.shape == (0, 10)
    assert joined.take(np.array([True, False, True])).rank.tolist() == [1, 0]


@pytest.mark.parametrize("name", COLUMNS)
def test_one_column_is_replaced_in_a_copy(name):
    boxes, column = random_boxes(3), getattr(module, name.upper())
    before = boxes.table.copy()
    other = boxes.replace(column, [7, 8, 9])
    assert other.table[:, column].tolist() == [7, 8, 9]
    assert (np.delete(other.table, column, 1) == np.delete(before, column, 1)).all()
    assert (boxes.table == before).all()
    assert getattr(other, name).tolist() == [7, 8, 9]


def test_equal_numbers_are_matched():
    for _ in range(50):
        left, right = (RNG.integers(0, 5, RNG.integers(0, 8)) for _ in range(2))
        pairs = [(i, j) for i, j in np.ndindex(len(left), len(right)) if left[i] == right[j]]
        assert list(zip(*(index.tolist() for index in matching(left, right)), strict=True)) == pairs
    assert ragged_arange(np.array([2, 0, 3])).tolist() == [0, 1, 0, 1, 2]
    assert ragged_arange(np.array([2])).dtype == np.int64
