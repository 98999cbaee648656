"""Redistribute, compute on whole matrices, redistribute back: the pipeline over waves."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.layouts.plan import Matrix, WavePlan, build_plan
from megatron_eopt.layouts.wire import (
    Buffers,
    FinishT,
    Transport,
    run_copies,
    verify_same_on_all_ranks,
)


@dataclass(frozen=True, slots=True)
class WaveBatch:
    """Local matrices of equal shape to compute on, in place."""

    wave: int  # number of the wave
    matrices: tuple[int, ...]  # indices into the list that the redistribution was built from
    # ``(len(matrices), rows, cols)``, contiguous; read the momenta, leave the updates
    tensor: Tensor


type LoadT = Callable[[int, Sequence[str]], Mapping[str, Tensor]]
"""Returns storage tensors by name: contiguous shards or fragments of any shape. Called on every
rank for each wave in turn, with the names of tensors that no wave before has needed."""

type ComputeT = Callable[[WaveBatch], None]
"""Computes on a batch in place; must not call collectives of the group unless every rank of the
group gets the same batches."""

type StoreT = Callable[[Mapping[str, Tensor]], None]
"""Takes results, each shaped like what was loaded, once the last wave that writes to them is done;
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
        buffers: Shared with other redistributions that never run at the same time.

    Raises:
        ConfigurationError: See :func:`build_plan`.
        RedistributionError: If the ranks of the group were given different lists.
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
        buffers: Buffers | None = None,
    ) -> None:
        self._transport = Transport(group, name)
        self._dtype = dtype
        self._device = torch.device(device)
        self._buffers = buffers or Buffers()
        self._steps = 0
        self.plan = build_plan(
            matrices,
            waves,
            rank=self._transport.rank,
            world_size=self._transport.world_size,
            element_size=dtype.itemsize,
        )
        self._last = _last_uses([wave.tensors for wave in self.plan.waves])
        self._last_out = _last_uses([wave.results for wave in self.plan.waves])
        self._shapes: dict[str, torch.Size] = {}
        verify_same_on_all_ranks(group, self.plan.digest, f"the plan of {name!r}")

    def run(
        self,
        inputs: Mapping[str, Tensor],
        compute: ComputeT,
        outputs: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Run all waves on tensors that are all there; collective over the group.

        Args:
            inputs: Storage tensor by name (:attr:`Matrix.stored_in`). Names that this rank does not
                store are ignored.
            compute: Called for every batch of this rank.
            outputs: Where to write, like ``inputs``, which it may be; by default new tensors.

        Returns:
            The outputs that this rank stores.

        Raises:
            ConfigurationError: If a tensor is missing, too small or not contiguous.
            RedistributionError: If a collective failed or did not finish in time.
        """
        if missing := [name for name in self.plan.tensors if name not in inputs]:
            rule = f"rank {self.plan.rank} stores a piece and must pass its tensor"
            raise ConfigurationError("tensors", missing[:8], rule, "Pass every stored tensor")
        sinks = outputs or {name: torch.empty_like(inputs[name]) for name in self.plan.tensors}
        self.run_waves(lambda *_: inputs, compute, lambda _: None, lambda *_: sinks)
        return {name: sinks[name] for wave in self.plan.waves for name in wave.results}

    def run_waves(
        self, load: LoadT, compute: ComputeT, store: StoreT, sinks: LoadT | None = None
    ) -> None:
        """Run all waves, asking for tensors when it is their turn; collective over the group.

        Args:
            load: Returns tensors to read, which are let go after their last wave.
            compute: Called for every batch of this rank.
            store: Takes results.
            sinks: Returns the tensors to write results to; new float32 ones by default.

        Raises:
            ConfigurationError: As :meth:`run`.
            RedistributionError: As :meth:`run`.
        """
        sources, results = _Live(load), _Live(sinks or self._new_results)
        coming = self._start_in(0, sources) if self.plan.waves else None
        leaving: _Travelling | None = None
        for number, wave in enumerate(self.plan.waves):
            assert coming is not None
            stack = self._buffer("compute", wave.compute_elements)
            self._finish_in(wave, coming, stack)
            if number + 1 < len(self.plan.waves):
                coming = self._start_in(number + 1, sources)
            for batch in wave.batches:
                shape = (len(batch.matrices), *batch.shape)
                local = stack.narrow(0, batch.offset, math.prod(shape)).view(shape)
                compute(WaveBatch(number, batch.matrices, local))
            if leaving is not None:
                self._finish_out(number - 1, leaving, results, store)
            leaving = self._start_out(number, stack, results)
        if leaving is not None:
            self._finish_out(len(self.plan.waves) - 1, leaving, results, store)
        self._steps += 1

    def _start_in(self, number: int, sources: "_Live") -> "_Travelling":
        exchange = self.plan.waves[number].inward
        tensors = sources.of(number, self.plan.waves[number].tensors)
        self._shapes.update({name: tensor.shape for name, tensor in tensors.items()})
        flat = self._flat("inputs", tensors)
        send = self._buffer("send in", sum(exchange.send_sizes))
        recv = self._buffer("recv in", sum(exchange.recv_sizes))
        run_copies(exchange.pack, flat, [send])
        finish = self._transport.start(exchange, send, recv, (self._steps, number, "in"))
        sources.forget(self._last[number])
        return _Travelling(flat, recv, finish)

    def _finish_in(self, wave: WavePlan, coming: "_Travelling", stack: Tensor) -> None:
        run_copies(wave.inward.keep, coming.flat, [stack])
        if coming.finish is not None:
            coming.finish()
            run_copies(wave.inward.unpack, [coming.recv], [stack])

    def _start_out(self, number: int, stack: Tensor, results: "_Live") -> "_Travelling":
        exchange = self.plan.waves[number].outward
        send = self._buffer("send out", sum(exchange.send_sizes))
        recv = self._buffer("recv out", sum(exchange.recv_sizes))
        run_copies(exchange.pack, [stack], [send])
        finish = self._transport.start(exchange, send, recv, (self._steps, number, "out"))
        flat = self._flat("outputs", results.of(number, self.plan.waves[number].results))
        run_copies(exchange.keep, [stack], flat)
        return _Travelling(flat, recv, finish)

    def _finish_out(
        self, number: int, leaving: "_Travelling", results: "_Live", store: StoreT
    ) -> None:
        if leaving.finish is not None:
            leaving.finish()
            run_copies(self.plan.waves[number].outward.unpack, [leaving.recv], leaving.flat)
        store(results.forget(self._last_out[number]))

    def _new_results(self, number: int, names: Sequence[str]) -> dict[str, Tensor]:
        return {
            name: torch.empty(self._shapes.pop(name), dtype=torch.float32, device=self._device)
            for name in names
        }

    def _buffer(self, purpose: str, elements: int) -> Tensor:
        return self._buffers.get(purpose, elements, self._dtype, self._device)

    def _flat(self, argument: str, tensors: Mapping[str, Tensor]) -> list[Tensor | None]:
        """Return flat views by the plan's index of tensors."""
        flat: list[Tensor | None] = [None] * self.plan.storage_tensors
        for name, whole in tensors.items():
            index, needed = self.plan.tensors[name]
            tensor = whole.detach()
            if tensor.numel() < needed or not tensor.is_contiguous():
                rule = f"must be contiguous with at least {needed} elements"
                what = (tuple(tensor.shape), tensor.stride())
                raise ConfigurationError(f"{argument}[{name!r}]", what, rule, "Pass the shard")
            flat[index] = tensor.view(-1)
        return flat


@dataclass(frozen=True, slots=True)
class _Travelling:
    """A wave under way in one direction, with this rank's storage tensors by their index."""

    flat: list[Tensor | None]
    recv: Tensor
    finish: FinishT | None


class _Live:
    """Storage tensors that some wave under way reads or writes."""

    def __init__(self, make: LoadT) -> None:
        self._make = make
        self._tensors: dict[str, Tensor] = {}

    def of(self, wave: int, names: Sequence[str]) -> dict[str, Tensor]:
        fresh = [name for name in names if name not in self._tensors]
        made = self._make(wave, fresh)
        self._tensors.update({name: made[name] for name in fresh})
        return {name: self._tensors[name] for name in names}

    def forget(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self._tensors.pop(name) for name in names}


def _last_uses(uses: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return of each wave's names those that no later wave has."""
    last = {name: number for number, names in enumerate(uses) for name in names}
    return [[name for name in names if last[name] == n] for n, names in enumerate(uses)]
