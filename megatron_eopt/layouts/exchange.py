"""One direction of one wave, as one rank sees it: split sizes and copies, computed from layouts.

The rule of the road: a piece of the sink layout whose rank holds all of it already is served by
that rank itself; every other piece comes from the sources of its elements. So an update reaches
every replica although only one copy was sent, and where nothing has to travel nothing is called.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_eopt.layouts.boxes import Boxes, Int64Array, intersect, matching
from megatron_eopt.layouts.moves import End, Moves, make_moves

__all__ = ["Exchange", "Side", "build_exchange"]


@dataclass(frozen=True, eq=False, slots=True)
class Side:
    """The layouts of a wave's matrices, laid below one another.

    Attributes:
        matrix: Number of the matrix of every box.
        boxes: The boxes, in one order on all ranks.
        tensor: For every matrix, which of this rank's flat tensors holds its piece.
        base: For every matrix, the place in that tensor where the piece's storage begins.
    """

    matrix: Int64Array
    boxes: Boxes
    tensor: Int64Array
    base: Int64Array

    def end(self, box: Int64Array, row: Int64Array, column: Int64Array) -> End:
        """Find elements ``(row, column)`` of boxes in this rank's tensors."""
        boxes, matrix = self.boxes.take(box), self.matrix[box]
        offset = self.base[matrix] + boxes.place(row, column)
        return End(self.tensor[matrix], offset, boxes.stride)


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one rank does in one direction of one wave.

    Attributes:
        send_sizes: Elements for every rank of the group, in the order of the send buffer.
        recv_sizes: Elements from every rank.
        pack: Copies from tensors to the send buffer.
        unpack: Copies from the receive buffer to tensors.
        keep: Copies from tensors to tensors on this rank.
        collective: Whether any rank of the group sends anything, so that all take part.
    """

    send_sizes: tuple[int, ...]
    recv_sizes: tuple[int, ...]
    pack: Moves
    unpack: Moves
    keep: Moves
    collective: bool


def build_exchange(source: Side, sink: Side, rank: int, world_size: int) -> Exchange:
    """Intersect two layouts of the same matrices; the work is linear in what ``rank`` touches.

    Args:
        source: Where the elements are.
        sink: Where they are wanted.
        rank: The rank whose part is materialised.
        world_size: Ranks of the group.
    """
    served = _self_served(source, sink, world_size)
    sends, wants = source.boxes.source == 1, ~served
    here, there = source.boxes.rank == rank, sink.boxes.rank == rank
    out = _pair(source, sink, sends & here, wants & ~there)
    into = _pair(source, sink, sends & ~here, wants & there)
    # where a piece is served by its own rank, replicas serve too
    own = _pair(source, sink, here, there)
    own = own.take(served[own.b] | sends[own.a])
    out = out.sorted_by(sink.boxes.rank[out.b])
    into = into.sorted_by(source.boxes.rank[into.a])
    return Exchange(
        send_sizes=out.sizes(sink.boxes.rank[out.b], world_size),
        recv_sizes=into.sizes(source.boxes.rank[into.a], world_size),
        pack=make_moves(out.height, out.width, out.in_source(source), out.in_wire()),
        unpack=make_moves(into.height, into.width, into.in_wire(), into.in_sink(sink)),
        keep=make_moves(own.height, own.width, own.in_source(source), own.in_sink(sink)),
        collective=bool(wants.any()),
    )


def _self_served(source: Side, sink: Side, world_size: int) -> npt.NDArray[np.bool_]:
    """Tell which boxes of the sink lie wholly in what their own rank holds of the source."""
    i, j = matching(
        sink.matrix * world_size + sink.boxes.rank, source.matrix * world_size + source.boxes.rank
    )
    _, _, height, width = intersect(sink.boxes.take(i), source.boxes.take(j))
    held = np.zeros(len(sink.boxes), np.int64)
    np.add.at(held, i, height * width)
    return np.equal(held, sink.boxes.area)


@dataclass(frozen=True, eq=False, slots=True)
class _Pairs:
    """Boxes ``a`` of the source that meet boxes ``b`` of the sink, and where they meet."""

    a: Int64Array
    b: Int64Array
    row: Int64Array
    column: Int64Array
    height: Int64Array
    width: Int64Array

    def take(self, index: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> "_Pairs":
        return _Pairs(
            self.a[index],
            self.b[index],
            self.row[index],
            self.column[index],
            self.height[index],
            self.width[index],
        )

    def sorted_by(self, peer: Int64Array) -> "_Pairs":
        return self.take(np.argsort(peer, kind="stable"))

    def sizes(self, peer: Int64Array, world_size: int) -> tuple[int, ...]:
        counts = np.zeros(world_size, np.int64)
        np.add.at(counts, peer, self.height * self.width)
        return tuple(counts.tolist())

    def in_source(self, source: Side) -> End:
        return source.end(self.a, self.row, self.column)

    def in_sink(self, sink: Side) -> End:
        return sink.end(self.b, self.row, self.column)

    def in_wire(self) -> End:
        area = self.height * self.width
        return End(np.zeros_like(area), np.cumsum(area) - area, self.width)


def _pair(
    source: Side, sink: Side, sends: npt.NDArray[np.bool_], wants: npt.NDArray[np.bool_]
) -> _Pairs:
    """Join the chosen boxes by matrix.

    The pairs are ordered by box of the source, then of the sink. Boxes have one order on all
    ranks, so both ends of a wire agree on it.
    """
    a, b = np.flatnonzero(sends), np.flatnonzero(wants)
    i, j = matching(source.matrix[a], sink.matrix[b])
    a, b = a[i], b[j]
    row, column, height, width = intersect(source.boxes.take(a), sink.boxes.take(b))
    pairs = _Pairs(a, b, row, column, height, width)
    return pairs.take((height > 0) & (width > 0))
