"""Main weights and state that live in the host's memory and come to the device wave by wave.

Note [Off-loading by waves]
    Between steps the memory of chosen tensors, and of their state, is the host's: whoever reads or
    writes them, as checkpoints do, sees what a device would hold. In a step a driver fetches what a
    wave needs, announces what the next one will, and writes back what a wave has changed. On a GPU
    each direction has a stream and memory is pinned; the host waits once, at the end of a step, so
    that everybody may read.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.layouts.redistribution import LoadT, StoreT
from megatron_eopt.optimizers.nested_state import leaves, put

type IsKeptT = Callable[[str, Any], bool]
"""Whether a value of state, by its kind, is kept on the host."""

type _Path = tuple[str, ...]
"""Where a tensor is in its parameter's state; empty for the parameter itself."""


@dataclass(frozen=True)
class HostPlace:
    """How much is kept on the host, and how it comes to the device."""

    fraction: float = 0.0  # of all elements, in [0, 1]
    movable: frozenset[Tensor] = frozenset()  # weights that are nobody else's memory
    device: torch.device | str = "cpu"  # where everything is stepped
    chunk_bytes: int = 0  # how much of it comes at a time, where there are no waves

    def chosen[T: Tensor](self, sizes: Mapping[T, int]) -> list[T]:
        """Return tensors with at most the fraction of all elements, and with most of it."""
        room = self.fraction * sum(sizes.values())
        found = []
        for param in sorted(sizes, key=sizes.__getitem__, reverse=True):
            if sizes[param] <= room:
                found.append(param)
                room -= sizes[param]
        return found


class HostMemory:
    """What of one driver's tensors is kept in the host's memory; see Note [Off-loading by waves].

    Args:
        params: The tensors whose state is kept there.
        weights: Those of them that are kept there themselves.
        place: How they come to the device.
        is_kept: Which tensors of their state are kept there, by kind; by default all.
    """

    def __init__(
        self,
        params: Iterable[Tensor] = (),
        weights: Iterable[Tensor] = (),
        place: HostPlace | None = None,
        is_kept: IsKeptT | None = None,
    ) -> None:
        place = place or HostPlace()
        self.params = frozenset(params)
        self._weights = frozenset(weights)
        self._is_kept = is_kept or (lambda kind, value: True)
        self._device = torch.device(place.device)
        self._chunk_bytes = place.chunk_bytes
        self._pinned = self._device.type == "cuda"
        self._inward, self._outward = _stream(self._device), _stream(self._device)
        self._coming: dict[Tensor, dict[_Path, Tensor]] = {}
        # the host's tensors of what is on the device now
        self._homes: dict[Tensor, dict[_Path, Tensor]] = {}

    def run(
        self,
        run: Callable[[LoadT, StoreT], None],
        load: LoadT,
        store: StoreT,
        params_of: Callable[[Iterable[str]], list[Tensor]],
        arriving: Callable[[int], Sequence[str]],
        state: Any,
    ) -> None:
        """Run waves, with what a wave needs on the device, and what it has changed on the host.

        Args:
            run: Runs all waves with what loads and what stores.
            load: See :data:`LoadT`.
            store: See :data:`StoreT`.
            params_of: Returns the tensors with some names.
            arriving: Returns the names that a wave is the first to need; none past the last.
            state: The state of the tensors.
        """

        def fetch_and_load(wave: int, names: Sequence[str]) -> Mapping[str, Tensor]:
            self.fetch(params_of(names), state)
            self.announce(params_of(arriving(wave + 1)), state)
            return load(wave, names)

        def store_and_write_back(results: Mapping[str, Tensor]) -> None:
            store(results)
            self.write_back(params_of(results), state)

        # what a step that ended in an error had announced may have changed since
        self._coming.clear()
        run(fetch_and_load, store_and_write_back)
        self.settle()

    def announce(self, params: Iterable[Tensor], state: Any) -> None:
        """Begin to copy what will be fetched."""
        for param in self.params.intersection(params):
            if param not in self._coming and param not in self._homes:
                with torch.cuda.stream(self._inward):
                    self._coming[param] = {
                        path: torch.empty_like(home, device=self._device, pin_memory=False).copy_(
                            home, non_blocking=True
                        )
                        for path, home in self._tensors(param, state)
                    }

    def fetch(self, params: Iterable[Tensor], state: Any) -> None:
        """Let weights and state be on the device; what is there already stays."""
        params = list(params)
        self.announce(params, state)
        if self._inward is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._inward)
        for param in self._coming.keys() & params:
            self._homes[param] = dict(self._tensors(param, state))
            for path, copy in self._coming.pop(param).items():
                if self._pinned:
                    copy.record_stream(torch.cuda.current_stream(self._device))
                _put(param, path, copy, state)

    def write_back(self, params: Iterable[Tensor], state: Any) -> None:
        """Let weights and state be on the host again, and state that is new for the first time."""
        if self._outward is not None:
            self._outward.wait_stream(torch.cuda.current_stream(self._device))
        for param in self.params.intersection(params):
            homes = self._homes.pop(param, {})
            for path, value in list(self._tensors(param, state)):
                home = homes.get(path)
                if home is None or not self._fits(home, value):
                    home = torch.empty_like(value, device="cpu", pin_memory=self._pinned)
                with torch.cuda.stream(self._outward):
                    home.copy_(value, non_blocking=True)
                if self._outward is not None:
                    value.record_stream(self._outward)
                _put(param, path, home, state)

    def settle(self) -> None:
        """Wait until the host may read what was written back."""
        if self._outward is not None:
            self._outward.synchronize()

    @contextmanager
    def stood_in_for(self) -> Iterator[None]:
        """Let weights look as on the device, without numbers: only so can they get gradients."""
        homes = {param: param.data for param in self._weights}
        for param, home in homes.items():
            param.data = torch.empty((), dtype=home.dtype, device=self._device).expand(home.shape)
        try:
            yield
        finally:
            for param, home in homes.items():
                param.data = home

    def step_in_chunks(
        self, params: Iterable[Tensor], step: Callable[[list[Tensor]], None], state: Any
    ) -> None:
        """Step first all that is on the device, then some at a time of what comes there."""
        self._coming.clear()
        chunks = self._chunks(params)
        for chunk, following in zip(chunks, [*chunks[1:], []], strict=True):
            self.fetch(chunk, state)
            self.announce(following, state)
            step(chunk)
            self.write_back(chunk, state)
        self.settle()

    def _chunks(self, params: Iterable[Tensor]) -> list[list[Tensor]]:
        found: dict[bool, list[Tensor]] = defaultdict(list)
        for param in params:
            found[param in self.params].append(param)
        chunks, room = [found[False]], 0
        for param in found[True]:
            if param.nbytes > room:
                chunks.append([])
                room = self._chunk_bytes
            chunks[-1].append(param)
            room -= param.nbytes
        return [chunk for chunk in chunks if chunk]

    def tensors(self, state: Any) -> Iterator[Tensor]:
        """Yield weights and state that are kept on the host."""
        for param in self.params:
            yield from (value for _, value in self._tensors(param, state))

    def _tensors(self, param: Tensor, state: Any) -> Iterator[tuple[_Path, Tensor]]:
        if param in self._weights:
            yield (), param.data
        for path, value in leaves(state.get(param, {})):
            # what has no dimensions counts steps
            if isinstance(value, Tensor) and value.dim() and self._is_kept(path[0], value):
                yield path, value

    def _fits(self, home: Tensor, value: Tensor) -> bool:
        alike = (home.shape, home.dtype) == (value.shape, value.dtype)
        return alike and home.device.type == "cpu" and (home.is_pinned() or not self._pinned)


def on_device(memories: Iterable[HostMemory | None], collect: Callable[[], None]) -> None:
    """Collect gradients, which only weights on the device can get."""
    with ExitStack() as stack:
        for memory in memories:
            if memory is not None:
                stack.enter_context(memory.stood_in_for())
        collect()


def _stream(device: torch.device) -> Any:
    return torch.Stream(device) if device.type == "cuda" else None


def _put(param: Tensor, path: _Path, value: Tensor, state: Any) -> None:
    if path:
        put(state[param], path, value)
    else:
        param.data = value
