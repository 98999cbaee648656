"""Redistribute, compute on whole matrices, redistribute back: all-to-alls, and waves of them.

Note [Places]
    A tensor whose elements all stay on a rank, in one run, need not be packed: its *place* is that
    run of the stack, if it is loaded for that wave. What is to be computed on is written there, and
    the result is read there. The next wave is loaded while one is computed on, so waves take turns
    with two stacks, and results at a place are stored before the wave after the next is loaded.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base import gpu
from megatron_eopt.base.address import address_of
from megatron_eopt.base.agreement import of_every_rank
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.meter import Meter
from megatron_eopt.layouts.assignment import first_uses
from megatron_eopt.layouts.exchange import Copy, Exchange
from megatron_eopt.layouts.plan import Matrix, build_plan, places_of

EXCHANGE = "exchange"
"""Name of the blocks in which elements are packed, waited for and unpacked."""

_MOST = 2**31 - 4096

type FlatT = Sequence[Tensor] | Mapping[int, Tensor]
"""Flat contiguous tensors by the index that copies have for them."""


@torch.library.custom_op("megatron_eopt::copy_blocks", mutates_args=("outs",))
def _copy_blocks(outs: Sequence[Tensor], blocks: Sequence[Tensor]) -> None:
    # Triton is there where GPUs are
    import_module("megatron_eopt.layouts.block_copies").launch(outs, blocks)


_copy_blocks.register_fake(lambda outs, blocks: None)


def run_copies(copies: Sequence[Copy], sources: FlatT, sinks: FlatT) -> None:
    """Copy every block between flat contiguous tensors; dtypes may differ.

    On a GPU that is one kernel for all of the same two dtypes, but for blocks of more elements than
    32 bits can count.
    """
    alike: dict[Any, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for copy in copies:
        out = _block(sinks[copy.sink], copy.size, copy.write)
        block = _block(sources[copy.source], copy.size, copy.read)
        is_small = out.numel() < _MOST
        alike[out.dtype, block.dtype, is_small and gpu.runs_kernels(out)].append((out, block))
    for (*_, is_served), pairs in alike.items():
        outs, blocks = map(list, zip(*pairs, strict=True))
        (_copy_blocks if is_served else torch._foreach_copy_)(outs, blocks)


def _block(tensor: Tensor, size: tuple[int, ...], place: tuple[int, ...]) -> Tensor:
    return tensor.as_strided(size, place[:-1], tensor.storage_offset() + place[-1])


def _check_agreement(group: dist.ProcessGroup | None, digest: str, name: str) -> None:
    """Raise a ConfigurationError on every rank that names those with another plan than most."""
    if group is None or dist.get_world_size(group) == 1:
        return
    digests = of_every_rank(digest, group)
    common, _ = Counter(digests).most_common(1)[0]
    odd = [rank for rank, other in enumerate(digests) if other != common]
    if odd:
        rule = f"group rank {odd} has another plan than most"
        way_out = "List the same parameters in the same order on every rank"
        raise ConfigurationError("matrices", name, rule, way_out)


@dataclass(frozen=True, slots=True)
class WaveBatch:
    """Local matrices of equal shape to compute on, in place."""

    matrices: tuple[int, ...]  # indices into the list that the redistribution was built from
    # ``(len(matrices), rows, cols)``, contiguous; read the momenta, leave the updates
    tensor: Tensor


type LoadT = Callable[[int, Sequence[str]], Mapping[str, Tensor]]
"""Returns storage tensors by name: contiguous shards or fragments of any shape. Called on every
rank for each wave in turn, with the names of tensors that no wave before has needed on any rank."""

type ComputeT = Callable[[WaveBatch], None]
"""Computes on a batch in place; must not call collectives of the group unless every rank of the
group gets the same batches."""

type StoreT = Callable[[Mapping[str, Tensor]], None]
"""Takes results, each like what was loaded, once the last wave that writes to them is done;
places that belong to no matrix are left undefined."""


class Redistribution:
    """Brings matrices from their storage to their compute layout and back, wave by wave.

    1. The next wave's elements travel in while this wave is computed on.
    2. ``compute`` is called once per shape with a contiguous stack of local matrices.
    3. This wave's results travel out while the next one is computed on.

    Per wave and direction there is at most one ``all_to_all_single``, and none where no rank of
    the group has anything to send.

    Args:
        matrices: The same list on every rank of the group, and so the next.
        waves: Indices into ``matrices``, see :func:`plan_waves`.
        group: The ranks of the layouts; None for a single process.
        dtype: Of the elements on the wire and of the stacks that ``compute`` gets.
        device: Where tensors live.
        name: What the group is, for messages.

    Raises:
        ConfigurationError: See :func:`build_plan`, or if the ranks of the group were given
            different lists.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        waves: Sequence[Sequence[int]],
        group: dist.ProcessGroup | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        name: str = "redistribution",
    ) -> None:
        self._group, self._dtype = group, dtype
        self._device = torch.device(device)
        # flat, live over steps, one per purpose
        self.buffers: dict[str, Tensor] = {}
        self.meter: Meter | None = None  # what to note times and bytes with
        self.plan = build_plan(
            matrices,
            waves,
            rank=0 if group is None else dist.get_rank(group),
            world_size=1 if group is None else dist.get_world_size(group),
            element_size=dtype.itemsize,
        )
        self._places = places_of(self.plan)
        planned, turns = self.plan.waves, 2 if self._places else 1
        # elements of the largest wave that takes each turn
        self._stack_sizes = [
            max((wave.compute_elements for wave in planned[turn::turns]), default=0)
            for turn in range(turns)
        ]
        # of each wave's names those that no later wave has
        self._last = first_uses([wave.tensors for wave in planned[::-1]])[::-1]
        self._last_out = first_uses([wave.results for wave in planned[::-1]])[::-1]
        self._alike: dict[str, tuple[torch.Size, torch.dtype]] = {}
        # what some wave under way reads and writes, and what lies at its place
        self._sources: dict[str, Tensor] = {}
        self._results: dict[str, Tensor] = {}
        self._placed: dict[str, Tensor] = {}
        _check_agreement(group, self.plan.digest, name)

    def arriving(self, wave: int) -> Sequence[str]:
        """Return the names that ``load`` will be called with for a wave; none past the last."""
        return self.plan.loads[wave] if wave < len(self.plan.loads) else ()

    def place(self, name: str) -> Tensor | None:
        """Return where ``load`` may put a tensor, flat, so that it is neither copied nor packed.

        That is where it is computed on, and where its result will be: its own from when it is
        loaded until it is stored. None if it has no such place; see Note [Places].
        """
        if name not in self._places:
            return None
        wave, start, size = self._places[name]
        return self._stack(wave).narrow(0, start, size)

    def run(self, load: LoadT, compute: ComputeT, store: StoreT) -> None:
        """Run all waves, asking for tensors when it is their turn; collective over the group.

        What ``load`` returns is let go after its last wave. Results are new tensors like those that
        were loaded, or lie where these do, if that is their :meth:`place`.
        """
        for tensors in (self._sources, self._results, self._placed):
            tensors.clear()
        waves = self.plan.waves
        coming = self._start_in(0, load) if waves else None
        leaving: _Travelling | None = None
        for number, wave in enumerate(waves):
            assert coming is not None
            stack = self._stack(number)
            with self._timed():
                kept = [copy for copy in wave.inward.keep if copy.source in coming.stored]
                run_copies(kept, coming.stored, [stack])
                coming.finish(wave.inward, [stack])
            if number + 1 < len(waves):
                coming = self._start_in(number + 1, load)
            for batch in wave.batches:
                shape = (len(batch.matrices), *batch.shape)
                local = stack.narrow(0, batch.offset, math.prod(shape)).view(shape)
                compute(WaveBatch(batch.matrices, local))
            if leaving is not None:
                self._finish_out(number - 1, leaving, store)
            leaving = self._start_out(number, stack, store)
        if leaving is not None:
            self._finish_out(len(waves) - 1, leaving, store)
        if self.meter is not None:
            self.meter.sent += self.plan.bytes_sent

    def _timed(self) -> AbstractContextManager[None]:
        return nullcontext() if self.meter is None else self.meter.span(EXCHANGE)

    def _stack(self, wave: int) -> Tensor:
        """Return the flat tensor that a wave is computed on."""
        turn = wave % len(self._stack_sizes)
        stack = self._buffer(f"compute {turn}", self._stack_sizes[turn])
        return stack[: self.plan.waves[wave].compute_elements]

    def _is_placed(self, name: str, tensor: Tensor) -> bool:
        """Return whether a tensor lies at its place."""
        place = self.place(name)
        if place is None or (place.dtype, place.numel()) != (tensor.dtype, tensor.numel()):
            return False
        return tensor.is_contiguous() and address_of(place) == address_of(tensor)

    def _start_in(self, number: int, load: LoadT) -> "_Travelling":
        wave = self.plan.waves[number]
        loaded = load(number, self.plan.loads[number])
        self._sources |= {name: loaded[name] for name in self.plan.loads[number]}
        tensors = {name: self._sources[name] for name in wave.tensors}
        self._placed |= {name: t for name, t in tensors.items() if self._is_placed(name, t)}
        others = {name: t for name, t in tensors.items() if name not in self._placed}
        self._alike.update({name: (t.shape, t.dtype) for name, t in others.items()})
        stored = self._flat(others)
        with self._timed():
            travelling = self._start(wave.inward, "in", stored, stored)
        for name in self._last[number]:
            del self._sources[name]
        return travelling

    def _start_out(self, number: int, stack: Tensor, store: StoreT) -> "_Travelling":
        wave = self.plan.waves[number]
        placed = {n: self._placed.pop(n) for n in wave.results if n in self._placed}
        names = [name for name in wave.results if name not in placed]
        for name in names:
            if name not in self._results:
                shape, dtype = self._alike.pop(name)
                self._results[name] = torch.empty(shape, dtype=dtype, device=self._device)
        stored = self._flat({name: self._results[name] for name in names})
        with self._timed():
            travelling = self._start(wave.outward, "out", [stack], stored)
            kept = [copy for copy in wave.outward.keep if copy.sink in stored]
            run_copies(kept, [stack], stored)
        if placed:
            store(placed)
        return travelling

    def _finish_out(self, number: int, leaving: "_Travelling", store: StoreT) -> None:
        with self._timed():
            leaving.finish(self.plan.waves[number].outward, leaving.stored)
        done = [name for name in self._last_out[number] if name in self._results]
        store({name: self._results.pop(name) for name in done})

    def _start(
        self, exchange: Exchange, direction: str, packed: FlatT, stored: FlatT
    ) -> "_Travelling":
        send = self._buffer(f"send {direction}", sum(exchange.send_sizes))
        recv = self._buffer(f"recv {direction}", sum(exchange.recv_sizes))
        run_copies(exchange.pack, packed, [send])
        work = None
        if exchange.collective:
            sizes = (list(exchange.recv_sizes), list(exchange.send_sizes))
            work = dist.all_to_all_single(recv, send, *sizes, group=self._group, async_op=True)
        return _Travelling(stored, recv, work)

    def _buffer(self, purpose: str, elements: int) -> Tensor:
        buffer = self.buffers.get(purpose)
        if buffer is None or buffer.numel() < elements:
            buffer = torch.empty(elements, dtype=self._dtype, device=self._device)
            self.buffers[purpose] = buffer
        return buffer[:elements]

    def _flat(self, tensors: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Return flat views by the plan's index of tensors."""
        flat = {}
        for name, whole in tensors.items():
            index, needed = self.plan.tensors[name]
            # what is not contiguous has no such view
            flat[index] = whole.detach().view(-1)
            assert flat[index].numel() >= needed, f"{name} is too small for its layout"
        return flat


@dataclass(frozen=True, slots=True)
class _Travelling:
    """A wave under way in one direction."""

    stored: FlatT  # this rank's storage tensors
    recv: Tensor
    # what to wait for: a CPU does, on a GPU the stream; None if nothing travels in the group
    work: dist.Work | None

    def finish(self, exchange: Exchange, sinks: FlatT) -> None:
        if self.work is not None:
            self.work.wait()
            run_copies(exchange.unpack, [self.recv], sinks)
