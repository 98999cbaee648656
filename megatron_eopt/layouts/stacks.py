"""Where waves are computed on, and which tensors may lie there before and after.

Note [Places]
    A tensor whose elements all stay on a rank, in one run, need not be packed: its *place* is that
    run of the stack, if it is loaded for that wave. What is to be computed on is written there, and
    the result is read there. The next wave is loaded while one is computed on, so waves take turns
    with two stacks, and results at a place are stored before the wave after the next is loaded.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import cached_property

from torch import Tensor

from megatron_eopt.base.address import address_of
from megatron_eopt.layouts.copies import Copy
from megatron_eopt.layouts.plan import Plan

type BufferT = Callable[[str, int], Tensor]
"""Returns this many elements of the flat tensor with a name, which lives on between steps."""


class Stacks:
    """Flat tensors that waves are computed on; see Note [Places].

    Args:
        plan: What is computed, and what is copied there and back.
        buffer: Where they live.
    """

    def __init__(self, plan: Plan, buffer: BufferT) -> None:
        self._plan, self._buffer = plan, buffer

    def of(self, wave: int) -> Tensor:
        """Return the stack of a wave."""
        turn = wave % len(self._largest)
        stack = self._buffer(f"compute {turn}", self._largest[turn])
        return stack[: self._plan.waves[wave].compute_elements]

    def place(self, name: str) -> Tensor | None:
        """Return the place of a tensor, flat; None if it has none."""
        if name not in self._places:
            return None
        wave, start, size = self._places[name]
        return self.of(wave).narrow(0, start, size)

    def holds(self, name: str, tensor: Tensor) -> bool:
        """Return whether a tensor lies at its place."""
        place = self.place(name)
        if place is None or (place.dtype, place.numel()) != (tensor.dtype, tensor.numel()):
            return False
        return tensor.is_contiguous() and address_of(place) == address_of(tensor)

    @cached_property
    def _largest(self) -> list[int]:
        """Elements of the largest wave that takes each turn."""
        waves, turns = self._plan.waves, 2 if self._places else 1
        by_turn = (waves[turn::turns] for turn in range(turns))
        return [max((wave.compute_elements for wave in mine), default=0) for mine in by_turn]

    @cached_property
    def _places(self) -> dict[str, tuple[int, int, int]]:
        """Wave, first element and size of each place."""
        return _places(self._plan)


def _places(plan: Plan) -> dict[str, tuple[int, int, int]]:
    """Return what is copied as it is, there and back."""
    found = {}
    for number, wave in enumerate(plan.waves):
        inward, outward = wave.inward, wave.outward
        moved = {copy.source for copy in inward.pack} | {copy.sink for copy in outward.unpack}
        ways: dict[int, list[Copy]] = defaultdict(list)
        for copy in inward.keep:
            ways[copy.source].append(copy)
        for copy in outward.keep:
            ways[copy.sink].append(copy)
        for name in wave.tensors:
            index, size = plan.tensors[name]
            start = ways[index][0].write[-1] if ways[index] else 0
            there = Copy(index, 0, (size,), (1, 0), (1, start))
            again = Copy(0, index, (size,), (1, start), (1, 0))
            if name in plan.loads[number] and index not in moved and ways[index] == [there, again]:
                found[name] = (number, start, size)
    return found
