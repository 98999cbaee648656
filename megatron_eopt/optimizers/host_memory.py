"""Keeps main weights and state in host memory, and copies them to the device wave by wave.

Note [Off-loading by waves]
    Between steps, chosen tensors and their state are in host memory, where checkpoints and other
    code read and write them as usual. In a step, an update rule fetches what a wave needs,
    prefetches what the next one needs, and writes back what a wave has changed. On a GPU, host
    memory is pinned and each direction has a stream. The host waits once, at the end of a step.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.nested_state import leaves, put
from megatron_eopt.layouts import Redistribution, WaveBatch
from megatron_eopt.layouts.redistribution import ComputeWaveT, LoadT, StoreT

type _Path = tuple[str, ...]
"""Where a tensor is in its parameter's state; empty for the parameter itself."""


@dataclass(frozen=True)
class OffloadSettings:
    """How much is kept in host memory, and how it is copied to the device."""

    fraction: float = 0.0  # of all elements, in [0, 1]
    movable: frozenset[Tensor] = frozenset()  # weights that share memory with nothing else
    device: torch.device | str = "cpu"  # where everything is updated
    chunk_bytes: int = 0  # bytes copied at a time by update rules without waves

    def chosen[T: Tensor](self, sizes: Mapping[T, int]) -> list[T]:
        """Return tensors, the largest first, with at most the fraction of all elements."""
        room = self.fraction * sum(sizes.values())
        params = []
        for param in sorted(sizes, key=sizes.__getitem__, reverse=True):
            if sizes[param] <= room:
                params.append(param)
                room -= sizes[param]
        return params


class HostMemory:
    """Keeps tensors of one update rule in host memory; see Note [Off-loading by waves].

    Args:
        params: Tensors whose state is kept there.
        weights: Those of ``params`` that are kept there themselves.
        settings: How they are copied to the device.
        is_kept: Whether a state value ``(kind, value, param)`` is kept there; by default all are.
    """

    def __init__(
        self,
        params: Iterable[Tensor] = (),
        weights: Iterable[Tensor] = (),
        settings: OffloadSettings | None = None,
        is_kept: Callable[[str, Any, Tensor], bool] | None = None,
    ) -> None:
        settings = settings or OffloadSettings()
        self.params = frozenset(params)
        self.weights = frozenset(weights)
        self._is_kept = is_kept or (lambda kind, value, param: True)
        self._device = torch.device(settings.device)
        self._chunk_bytes = settings.chunk_bytes
        self._pinned = self._device.type == "cuda"
        self._inward, self._outward = _stream(self._device), _stream(self._device)
        self._coming: dict[Tensor, dict[_Path, Tensor]] = {}
        self._homes: dict[Tensor, dict[_Path, Tensor]] = {}  # host tensors of what is on the device

    def run_waves(
        self,
        redistribution: Redistribution,
        load: LoadT,
        compute: ComputeWaveT,
        store: StoreT,
        params_of: Callable[[Iterable[str]], list[Tensor]],
        owned_of: Callable[[Sequence[int]], list[Tensor]],
        state: Any,
    ) -> None:
        """Run all waves; fetch what each needs, and write back what it changes.

        Args:
            redistribution: What has the waves.
            load: See :data:`LoadT`.
            compute: See :data:`ComputeWaveT`.
            store: See :data:`StoreT`.
            params_of: Returns the tensors with the given names, of which waves load some.
            owned_of: Returns the tensors that have the state of a batch's matrices.
            state: The state of all these tensors.
        """

        def fetch_and_load(wave: int, names: Sequence[str]) -> Mapping[str, Tensor]:
            self.fetch(params_of(names), state)
            self.announce(params_of(redistribution.arriving(wave + 1)), state)
            return load(wave, names)

        batches = [batch.matrices for wave in redistribution.plan.waves for batch in wave.batches]
        following = iter([*batches[1:], ()])

        def fetch_and_compute(batch: WaveBatch) -> None:
            self.fetch(owned_of(batch.matrices), state)
            self.announce(owned_of(next(following)), state)
            compute(batch)
            self.write_back(owned_of(batch.matrices), state)

        def store_and_write_back(results: Mapping[str, Tensor]) -> None:
            store(results)
            self.write_back(params_of(results), state)

        # a step that failed may have left outdated prefetches
        self._coming.clear()
        redistribution.run(fetch_and_load, fetch_and_compute, store_and_write_back)
        self.wait_for_write_back()

    def announce(self, params: Iterable[Tensor], state: Any) -> None:
        """Start to copy what will be fetched (prefetch)."""
        for param in self.params.intersection(params):
            if param not in self._coming and param not in self._homes:
                # on a CPU the stream is None, and the block changes nothing
                with torch.cuda.stream(self._inward):
                    self._coming[param] = {
                        path: torch.empty_like(home, device=self._device, pin_memory=False).copy_(
                            home, non_blocking=True
                        )
                        for path, home in self._tensors(param, state)
                    }

    def fetch(self, params: Iterable[Tensor], state: Any) -> None:
        """Put weights and state on the device; what is already there stays."""
        params = list(params)
        self.announce(params, state)
        arriving = self._coming.keys() & params
        if arriving and self._inward is not None:
            # the device waits for the copies, not the host
            torch.cuda.current_stream(self._device).wait_stream(self._inward)
        for param in arriving:
            self._homes[param] = dict(self._tensors(param, state))
            for path, copy in self._coming.pop(param).items():
                if self._pinned:
                    # Allocated on the inward stream, used on this one: without this its memory
                    # could be given to the next prefetch while it is still read.
                    copy.record_stream(torch.cuda.current_stream(self._device))
                _put(param, path, copy, state)

    def write_back(self, params: Iterable[Tensor], state: Any) -> None:
        """Move weights and state back to the host, including state that is new."""
        leaving = self.params.intersection(params)
        if leaving and self._outward is not None:
            # the step that changes these tensors must have ended
            self._outward.wait_stream(torch.cuda.current_stream(self._device))
        for param in leaving:
            homes = self._homes.pop(param, {})
            for path, value in list(self._tensors(param, state)):
                home = homes.get(path)
                if home is None or not self._fits(home, value):
                    home = torch.empty_like(value, device="cpu", pin_memory=self._pinned)
                with torch.cuda.stream(self._outward):
                    home.copy_(value, non_blocking=True)
                if self._outward is not None:
                    # its last reference goes below, while the copy may still read it
                    value.record_stream(self._outward)
                _put(param, path, home, state)

    def wait_for_write_back(self) -> None:
        """Wait until the host can read what was written back."""
        if self._outward is not None:
            self._outward.synchronize()

    @contextmanager
    def stood_in_for(self) -> Iterator[None]:
        """Replace host weights by empty device tensors in a block, so that they get gradients."""
        homes = {param: param.data for param in self.weights}
        for param, home in homes.items():
            # one element, expanded: gradients need a shape and a device, not the memory
            param.data = torch.empty((), dtype=home.dtype, device=self._device).expand(home.shape)
        try:
            yield
        finally:
            for param, home in homes.items():
                param.data = home

    def step_in_chunks(
        self, params: Iterable[Tensor], step: Callable[[list[Tensor]], None], state: Any
    ) -> None:
        """Call ``step`` on tensors that stay on the device, then on chunks of off-loaded ones."""
        self._coming.clear()
        for chunk, following in pairwise([*self._chunks(params), []]):
            self.fetch(chunk, state)
            self.announce(following, state)
            step(chunk)
            self.write_back(chunk, state)
        self.wait_for_write_back()

    def _chunks(self, params: Iterable[Tensor]) -> list[list[Tensor]]:
        by_off_loaded: dict[bool, list[Tensor]] = defaultdict(list)
        for param in params:
            by_off_loaded[param in self.params].append(param)
        chunks, room = [by_off_loaded[False]], 0
        for param in by_off_loaded[True]:
            if param.nbytes > room:
                chunks.append([])
                room = self._chunk_bytes
            chunks[-1].append(param)
            room -= param.nbytes
        return [chunk for chunk in chunks if chunk]

    def follow(self, replaced: Mapping[Tensor, Tensor]) -> None:
        """Keep the state of other tensors from now on, between steps or at the edge of one.

        Args:
            replaced: The new tensor for each old one; those that are missing stay.
        """
        self.params = frozenset(replaced.get(param, param) for param in self.params)
        self.weights = frozenset(replaced.get(param, param) for param in self.weights)
        # what a step that failed had fetched belongs to the old tensors
        self._coming.clear()
        self._homes.clear()

    def tensors(self, state: Any) -> Iterator[Tensor]:
        """Yield the weights and state that are kept on the host."""
        for param in self.params:
            yield from (value for _, value in self._tensors(param, state))

    def _tensors(self, param: Tensor, state: Any) -> Iterator[tuple[_Path, Tensor]]:
        if param in self.weights:
            yield (), param.data
        for path, value in leaves(state.get(param, {})):
            # tensors without dimensions, such as step counters, stay
            if isinstance(value, Tensor) and value.dim() and self._is_kept(path[0], value, param):
                yield path, value

    def _fits(self, home: Tensor, value: Tensor) -> bool:
        # code that loads a state dict may have put another tensor in its place
        alike = (home.shape, home.dtype) == (value.shape, value.dtype)
        return alike and home.device.type == "cpu" and (home.is_pinned() or not self._pinned)


def _stream(device: torch.device) -> Any:
    return torch.Stream(device) if device.type == "cuda" else None


def _put(param: Tensor, path: _Path, value: Tensor, state: Any) -> None:
    if path:
        put(state[param], path, value)
    else:
        param.data = value
