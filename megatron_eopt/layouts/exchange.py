"""One direction of one wave, as one rank sees it: split sizes and copies, computed from layouts.

The rule of the road: a piece of the sink layout whose rank holds all of it already is served by
that rank itself; every other piece comes from the sources of its elements. So an update reaches
every replica although only one copy was sent, and where nothing has to travel nothing is called.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_eopt.layouts.boxes import Boxes, Int64Array, intersect, matching
from megatron_eopt.layouts.copies import Copy, End, make_copies


@dataclass(frozen=True, eq=False, slots=True)
class Side:
    """The layouts of a wave's matrices, laid below one another."""

    matrix: Int64Array  # number of the matrix of every box
    boxes: Boxes  # the boxes, in one order on all ranks
    tensor: Int64Array  # for every matrix, which of this rank's flat tensors holds its piece
    base: Int64Array  # for every matrix, the place in that tensor where the piece's storage begins

    def only(self, wanted: npt.NDArray[np.bool_]) -> "Side":
        """Return the same without the boxes of the other matrices."""
        kept = wanted[self.matrix]
        return Side(self.matrix[kept], self.boxes.take(kept), self.tensor, self.base)

    def end(self, box: Int64Array, row: Int64Array, column: Int64Array) -> End:
        """Find elements ``(row, column)`` of boxes in this rank's tensors."""
        boxes, matrix = self.boxes.take(box), self.matrix[box]
        offset = self.base[matrix] + boxes.place(row, column)
        return End(self.tensor[matrix], offset, boxes.stride)


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one rank does in one direction of one wave."""

    # elements for every rank of the group, in the order of the send buffer
    send_sizes: tuple[int, ...]
    recv_sizes: tuple[int, ...]  # elements from every rank
    pack: list[Copy]  # copies from tensors to the send buffer
    unpack: list[Copy]  # copies from the receive buffer to tensors
    keep: list[Copy]  # copies from tensors to tensors on this rank
    collective: bool  # whether any rank of the group sends anything, so that all take part


def build_exchange(source: Side, sink: Side, rank: int, world_size: int) -> Exchange:
    """Return what ``rank`` does to bring elements from where they are to where they are wanted.

    The work is linear in what that rank touches.
    """
    served = _self_served(source, sink, world_size)
    sends, wants = source.boxes.source == 1, ~served
    here, there = source.boxes.rank == rank, sink.boxes.rank == rank
    out = _pair(source, sink, sends & here, wants & ~there)
    into = _pair(source, sink, sends & ~here, wants & there)
    # where a piece is served by its own rank, replicas serve too
    own = _pair(source, sink, here, there)
    own = own.take(served[own.b] | sends[own.a])
    out, send_sizes = _by_peer(out, sink.boxes.rank[out.b], world_size)
    into, recv_sizes = _by_peer(into, source.boxes.rank[into.a], world_size)
    return Exchange(
        send_sizes=send_sizes,
        recv_sizes=recv_sizes,
        pack=make_copies(out.height, out.width, out.in_source(source), out.in_wire()),
        unpack=make_copies(into.height, into.width, into.in_wire(), into.in_sink(sink)),
        keep=make_copies(own.height, own.width, own.in_source(source), own.in_sink(sink)),
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
        columns = (self.a, self.b, self.row, self.column, self.height, self.width)
        return _Pairs(*(column[index] for column in columns))

    def in_source(self, source: Side) -> End:
        return source.end(self.a, self.row, self.column)

    def in_sink(self, sink: Side) -> End:
        return sink.end(self.b, self.row, self.column)

    def in_wire(self) -> End:
        area = self.height * self.width
        return End(np.zeros_like(area), np.cumsum(area) - area, self.width)


def _by_peer(pairs: _Pairs, peer: Int64Array, world_size: int) -> tuple[_Pairs, tuple[int, ...]]:
    """Sort what travels by the rank at the other end; returns the elements for each rank, too."""
    counts = np.zeros(world_size, np.int64)
    np.add.at(counts, peer, pairs.height * pairs.width)
    return pairs.take(np.argsort(peer, kind="stable")), tuple(counts.tolist())


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
