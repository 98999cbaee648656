"""Move matrices to where they are computed and back, with all-to-alls in waves.

Note [Places]
    A tensor whose elements all stay on its rank, in one run, need not be packed. Its *place* is
    that run of the stack of the wave that loads it: inputs are written there and results are read
    there. The next wave is loaded while the current one is computed, so waves alternate between two
    stacks, and results in places are stored before the wave after the next is loaded.
"""

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base import gpu
from megatron_eopt.base.address import address_of
from megatron_eopt.base.agreement import gather_objects
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.kernels import Family
from megatron_eopt.layouts.assignment import first_uses
from megatron_eopt.layouts.exchange import Copy, Exchange
from megatron_eopt.layouts.plan import Matrix, build_plan, places_of

EXCHANGE = "exchange"
"""Name of the timed blocks in which elements are packed, waited for and unpacked."""

_MOST = 2**31 - 4096  # elements that the kernel can index with 32 bits

KERNELS = Family("copies of blocks")

type FlatT = Sequence[Tensor] | Mapping[int, Tensor]
"""Flat contiguous tensors, by the index that copies use."""


# a torch operator, because a dry run counts operators and has no data for a kernel
@torch.library.custom_op("megatron_eopt::copy_blocks", mutates_args=("outs",))
def copy_blocks(outs: Sequence[Tensor], blocks: Sequence[Tensor]) -> None:
    """Copy blocks of one dtype to ``outs`` of one dtype by a kernel, see ``block_copies``."""
    KERNELS.call(outs[0], "megatron_eopt.layouts.block_copies", "launch", outs, blocks)


copy_blocks.register_fake(lambda outs, blocks: None)


def run_copies(copies: Sequence[Copy], sources: FlatT, sinks: FlatT) -> None:
    """Copy every block between flat contiguous tensors, whose dtypes may differ.

    On a GPU, blocks of the same two dtypes are one launch, unless they exceed 32-bit indices.
    """
    alike: dict[Any, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for copy in copies:
        sink, source = sinks[copy.sink], sources[copy.source]
        (*to, start), (*from_, first) = copy.write, copy.read
        # `as_strided` counts from the beginning of the storage, not of the tensor
        out = sink.as_strided(copy.size, to, sink.storage_offset() + start)
        block = source.as_strided(copy.size, from_, source.storage_offset() + first)
        is_small = out.numel() < _MOST
        alike[out.dtype, block.dtype, is_small and KERNELS.runs(out)].append((out, block))
    for (*_, is_served), pairs in alike.items():
        outs, blocks = map(list, zip(*pairs, strict=True))
        (copy_blocks if is_served else torch._foreach_copy_)(outs, blocks)


def _check_agreement(group: dist.ProcessGroup | None, digest: str, name: str) -> None:
    """Raise a ConfigurationError on every rank if some ranks have another plan than most."""
    if group is None or dist.get_world_size(group) == 1:
        return
    digests = gather_objects(digest, group)
    # the minority is named, because it is more likely to be wrong
    common, _ = Counter(digests).most_common(1)[0]
    odd = [rank for rank, other in enumerate(digests) if other != common]
    if odd:
        rule = f"group rank {odd} has another redistribution plan than the other ranks"
        hint = "Pass the same parameters in the same order on every rank"
        raise ConfigurationError("matrices", name, rule, hint)


@dataclass(frozen=True, slots=True)
class WaveBatch:
    """Local matrices of equal shape, to be computed in place."""

    matrices: tuple[int, ...]  # indices into the redistribution's list of matrices
    tensor: Tensor  # contiguous ``(len(matrices), rows, cols)``; directions in, updates out


type LoadT = Callable[[int, Sequence[str]], Mapping[str, Tensor]]
"""Returns storage tensors by name: contiguous shards or fragments of any shape. Every rank calls it
for each wave in turn, with the names of tensors that no earlier wave needs on any rank."""

type ComputeWaveT = Callable[[WaveBatch], None]
"""Computes a batch in place; collectives are allowed only if all ranks get the same batches."""

type StoreT = Callable[[Mapping[str, Tensor]], None]
"""Takes results, each shaped like the loaded tensor, after the last wave that writes to them.
Elements after the last one of a matrix are zero, other elements of no matrix are undefined."""


class Meter(Protocol):
    """Measures runs."""

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Time a block."""

    def count_bytes(self, sent: int) -> None:
        """Add bytes that were sent to other ranks."""


class Redistribution:
    """Moves matrices from their storage layout to their compute layout and back, wave by wave.

    1. The next wave's elements arrive while this wave is computed.
    2. ``compute`` is called once per shape with a contiguous stack of local matrices.
    3. This wave's results are sent while the next wave is computed.

    A wave needs at most one ``all_to_all_single`` per direction, and none if no rank of the group
    has anything to send.

    Args:
        matrices: The matrices, in the same order on every rank of the group.
        waves: Indices into ``matrices``, equal on every rank; see :func:`plan_waves`.
        group: The ranks of the layouts; None for a single process.
        dtype: Dtype of the elements sent and of the stacks that ``compute`` gets.
        device: Device of all tensors.
        name: Name of the group in error messages.

    Raises:
        ConfigurationError: If a layout has gaps or overlaps, or the ranks got different lists.
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
        self.buffers: dict[str, Tensor] = {}  # flat, by purpose, reused by all steps
        self.measure(None)
        self.plan = build_plan(
            matrices,
            waves,
            rank=0 if group is None else dist.get_rank(group),
            world_size=1 if group is None else dist.get_world_size(group),
            element_size=dtype.itemsize,
        )
        self._places = places_of(self.plan)
        planned, turns = self.plan.waves, 2 if self._places else 1
        # for each wave, the name of the buffer that has its stack
        self._stacks = [f"compute {number % turns}" for number in range(len(planned))]
        # each has the size of the largest wave that uses it
        self._stack_sizes = {
            f"compute {turn}": max(wave.compute_elements for wave in planned[turn::turns])
            for turn in range(min(turns, len(planned)))
        }
        # for each wave, the names that no later wave has
        self._last = first_uses([wave.tensors for wave in planned[::-1]])[::-1]
        self._last_out = first_uses([wave.results for wave in planned[::-1]])[::-1]
        # shape and dtype of loaded tensors, to which their results are made alike
        self._forms: dict[str, tuple[torch.Size, torch.dtype]] = {}
        # tensors that running waves read, tensors that they write, and tensors in their places
        self._sources: dict[str, Tensor] = {}
        self._results: dict[str, Tensor] = {}
        self._placed: dict[str, Tensor] = {}
        self._views: dict[str, tuple[Tensor, Tensor]] = {}  # buffers and places in them
        _check_agreement(group, self.plan.digest, name)

    def measure(self, meter: Meter | None) -> None:
        """Record times and bytes of the following runs; None stops recording."""
        self._meter = meter
        self._timed: Callable[[], AbstractContextManager[None]] = (
            nullcontext if meter is None else functools.partial(meter.timed, EXCHANGE)
        )

    def arriving(self, wave: int) -> Sequence[str]:
        """Return the names that ``load`` will get for a wave; none after the last wave."""
        return self.plan.loads[wave] if wave < len(self.plan.loads) else ()

    def place(self, name: str) -> Tensor | None:
        """Return flat memory where ``load`` may put a tensor, to avoid copying and packing it.

        It is computed there and its result is stored from there. The memory is the tensor's own
        from its load to its store. None if the tensor has no place; see Note [Places].
        """
        if name not in self._places:
            return None
        wave, start, size = self._places[name]
        # a view is made again only if a larger buffer has replaced the one that it shows
        buffer, view = self._views.get(name, (None, None))
        if view is None or buffer is not self.buffers.get(self._stacks[wave]):
            elements = self.plan.waves[wave].compute_elements
            view = self._buffer(self._stacks[wave], elements).narrow(0, start, size)
            self._views[name] = self.buffers[self._stacks[wave]], view
        return view

    def run(
        self, load: LoadT, compute: ComputeWaveT, store: StoreT, side: gpu.SideStream | None = None
    ) -> None:
        """Run all waves, and load tensors when they are needed; collective over the group.

        Without a group, ``load`` runs on the ``side`` stream, beside computing the wave before.

        Tensors that ``load`` returned are released after their last wave. Results are new tensors,
        or are in the tensors' :meth:`place` if they were loaded there.
        """
        for tensors in (self._sources, self._results, self._placed):
            # a step that raised an error may have left some
            tensors.clear()
        waves = self.plan.waves
        # if ranks communicate, the all-to-all itself runs beside the computation, on the back end's
        # own stream or thread
        side = side if self._group is None else None
        coming = self._start_in(0, load) if waves else None
        leaving: _InFlight | None = None
        for number, wave in enumerate(waves):
            assert coming is not None
            stack = self._buffer(self._stacks[number], wave.compute_elements)
            if side is not None:
                side.join()
            with self._timed():
                # without the tensors in their places, which need no copy
                local_copies = [copy for copy in wave.inward.keep if copy.source in coming.stored]
                run_copies(local_copies, coming.stored, [stack])
                coming.finish(wave.inward, [stack])
            # The next wave is sent before this one is computed, so that it travels meanwhile. Its
            # buffers are free, since this wave has been unpacked. All ranks call collectives in
            # this order: in 0, in 1, out 0, in 2, out 1, ... Back ends match them by order alone.
            if number + 1 < len(waves):
                with nullcontext() if side is None else side.beside():
                    coming = self._start_in(number + 1, load)
            for batch in wave.batches:
                shape = (len(batch.matrices), *batch.shape)
                local = stack.narrow(0, batch.offset, math.prod(shape)).view(shape)
                compute(WaveBatch(batch.matrices, local))
            # the wave before has travelled meanwhile, and this one needs its buffers
            if leaving is not None:
                self._finish_out(number - 1, leaving, store)
            # once this returns, results are packed or copied, and the stack may be overwritten
            leaving = self._start_out(number, stack, store)
        if leaving is not None:
            self._finish_out(len(waves) - 1, leaving, store)
        if self._meter is not None:
            self._meter.count_bytes(self.plan.bytes_sent)

    def _start_in(self, number: int, load: LoadT) -> "_InFlight":
        wave = self.plan.waves[number]
        loaded = load(number, self.plan.loads[number])
        self._sources |= {name: loaded[name] for name in self.plan.loads[number]}
        tensors = {name: self._sources[name] for name in wave.tensors}
        # `load` need not use a place; then the tensor is copied like any other
        self._placed |= {
            name: tensor
            for name, tensor in tensors.items()
            if (place := self.place(name)) is not None
            and (place.dtype, place.numel()) == (tensor.dtype, tensor.numel())
            and tensor.is_contiguous()
            and address_of(place) == address_of(tensor)
        }
        others = {name: t for name, t in tensors.items() if name not in self._placed}
        self._forms.update({name: (t.shape, t.dtype) for name, t in others.items()})
        stored = self._flat(others)
        with self._timed():
            travelling = self._start(wave.inward, "in", stored, stored)
        # `travelling` refers to them until they are copied
        for name in self._last[number]:
            del self._sources[name]
        return travelling

    def _start_out(self, number: int, stack: Tensor, store: StoreT) -> "_InFlight":
        wave = self.plan.waves[number]
        placed = {n: self._placed.pop(n) for n in wave.results if n in self._placed}
        names = [name for name in wave.results if name not in placed]
        for name in names:
            if name not in self._results:
                shape, dtype = self._forms.pop(name)
                result = torch.empty(shape, dtype=dtype, device=self._device)
                # padding, which no copy writes: without this it would be any memory, even nan
                result.view(-1)[self.plan.tensors[name][1] :].zero_()
                self._results[name] = result
        stored = self._flat({name: self._results[name] for name in names})
        with self._timed():
            travelling = self._start(wave.outward, "out", [stack], stored)
            local_copies = [copy for copy in wave.outward.keep if copy.sink in stored]
            run_copies(local_copies, [stack], stored)
        if placed:
            store(placed)
        return travelling

    def _finish_out(self, number: int, leaving: "_InFlight", store: StoreT) -> None:
        with self._timed():
            leaving.finish(self.plan.waves[number].outward, leaving.stored)
        done = [name for name in self._last_out[number] if name in self._results]
        store({name: self._results.pop(name) for name in done})

    def _start(
        self, exchange: Exchange, direction: str, packed: FlatT, stored: FlatT
    ) -> "_InFlight":
        if not exchange.collective:
            return _InFlight(stored, None, None)
        send = self._buffer(f"send {direction}", sum(exchange.send_sizes))
        recv = self._buffer(f"recv {direction}", sum(exchange.recv_sizes))
        run_copies(exchange.pack, packed, [send])
        sizes = (list(exchange.recv_sizes), list(exchange.send_sizes))
        # also a rank with nothing to send or receive calls it, with sizes of 0
        work = dist.all_to_all_single(recv, send, *sizes, group=self._group, async_op=True)
        return _InFlight(stored, recv, work)

    def _buffer(self, purpose: str, elements: int) -> Tensor:
        """Return the first ``elements`` of a buffer."""
        # Kept between steps: asking the allocator in each would cost time and fragment memory. The
        # wave before is unpacked before its buffer is used or replaced.
        buffer, size = self.buffers.get(purpose), max(elements, self._stack_sizes.get(purpose, 0))
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=self._dtype, device=self._device)
            self.buffers[purpose] = buffer
        return buffer.narrow(0, 0, elements)

    def _flat(self, tensors: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Return flat views of tensors, by their index in the plan."""
        flat = {}
        for name, whole in tensors.items():
            index, needed = self.plan.tensors[name]
            # view() raises if a tensor is not contiguous
            flat[index] = whole.detach().view(-1)
            assert flat[index].numel() >= needed, f"{name} is too small for its layout"
        return flat


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A wave in transit in one direction."""

    stored: FlatT  # this rank's storage tensors
    recv: Tensor | None  # None if no rank of the group sends anything
    work: dist.Work | None

    def finish(self, exchange: Exchange, sinks: FlatT) -> None:
        if self.recv is not None and self.work is not None:
            # with NCCL only the current stream waits here, with gloo the host does
            self.work.wait()
            run_copies(exchange.unpack, [self.recv], sinks)
