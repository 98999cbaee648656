"""Redistribute, compute on whole matrices, redistribute back: the pipeline over waves."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.layouts.copying import run_moves
from megatron_eopt.layouts.plan import Matrix, WavePlan, build_plan
from megatron_eopt.layouts.transport import Buffers, Pending, Transport, verify_same_on_all_ranks

__all__ = ["Redistribution", "WaveBatch"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WaveBatch:
    """Local matrices of equal shape to compute on, in place.

    Attributes:
        wave: Number of the wave.
        matrices: Indices into the list that the redistribution was built from.
        tensor: ``(len(matrices), rows, cols)``, contiguous; read the momenta, leave the updates.
    """

    wave: int
    matrices: tuple[int, ...]
    tensor: Tensor


class Redistribution:
    """Brings matrices from their storage to their compute layout and back, wave by wave.

    1. The next wave's elements travel in while this wave is computed on.
    2. ``compute`` is called once per shape with a contiguous stack of local matrices.
    3. This wave's results travel out while the next one is computed on.

    Per wave and direction there is at most one ``all_to_all_single``, and none where no rank of
    the group has anything to send.

    Args:
        matrices: The same list on every rank of the group.
        waves: Indices into ``matrices``, see :func:`plan_waves`; the same on every rank.
        group: The ranks of the layouts; None for a single process.
        dtype: Of the elements on the wire.
        compute_dtype: Of the stacks that ``compute`` gets; ``dtype`` by default.
        device: Where tensors live.
        timeout_s: Seconds to wait for other ranks in one collective.
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
        compute_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        timeout_s: float = 600.0,
        name: str = "redistribution",
        buffers: Buffers | None = None,
    ) -> None:
        self._transport = Transport(group, name, timeout_s)
        self._dtype = dtype
        self._compute_dtype = compute_dtype or dtype
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
        verify_same_on_all_ranks(group, self.plan.digest, f"the plan of {name!r}", self._device)
        logger.debug("%s", self.plan.describe())

    def run(
        self,
        inputs: Mapping[str, Tensor],
        compute: Callable[[WaveBatch], None],
        outputs: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Run all waves; collective over the group.

        Args:
            inputs: Storage tensor by name (:attr:`Matrix.stored_in`): this rank's contiguous
                shards or fragments, of any shape. Names that this rank does not store are ignored.
            compute: Called for every batch of this rank; must not call collectives of the group
                unless every rank of the group gets the same batches.
            outputs: Where to write, like ``inputs``; new tensors like the inputs by default, of
                which places that belong to no matrix are left undefined. May be the inputs.

        Returns:
            The outputs that this rank stores.

        Raises:
            ConfigurationError: If a tensor is missing, too small or not contiguous.
            RedistributionError: If a collective failed or did not finish in time.
        """
        if outputs is None:
            outputs = {name: torch.empty_like(inputs[name]) for name in self._present(inputs)}
        sources, sinks = self._flat("inputs", inputs), self._flat("outputs", outputs)
        waves = self.plan.waves
        arriving = self._start_in(0, sources) if waves else None
        leaving: Pending | None = None
        for number, wave in enumerate(waves):
            stack = self._buffer("compute", wave.compute_elements, self._compute_dtype)
            self._finish_in(wave, arriving, stack, sources)
            arriving = self._start_in(number + 1, sources) if number + 1 < len(waves) else None
            for batch in wave.batches:
                shape = (len(batch.matrices), *batch.shape)
                local = stack.narrow(0, batch.offset, math.prod(shape)).view(shape)
                compute(WaveBatch(number, batch.matrices, local))
            if number:
                self._finish_out(waves[number - 1], leaving, sinks)
            leaving = self._start_out(number, stack, sinks)
        if waves:
            self._finish_out(waves[-1], leaving, sinks)
        self._steps += 1
        return {name: outputs[name] for name in self.plan.tensors}

    def _start_in(self, number: int, sources: list[Tensor | None]) -> Pending | None:
        exchange = self.plan.waves[number].inward
        send = self._buffer("send in", sum(exchange.send_sizes), self._dtype)
        recv = self._buffer("recv in", sum(exchange.recv_sizes), self._dtype)
        run_moves(exchange.pack, sources, [send])
        return self._transport.start(exchange, send, recv, self._steps, number, "in")

    def _finish_in(
        self,
        wave: WavePlan,
        pending: Pending | None,
        stack: Tensor,
        sources: list[Tensor | None],
    ) -> None:
        run_moves(wave.inward.keep, sources, [stack])
        if pending is not None:
            pending.finish(self._device)
            recv = self._buffer("recv in", sum(wave.inward.recv_sizes), self._dtype)
            run_moves(wave.inward.unpack, [recv], [stack])

    def _start_out(self, number: int, stack: Tensor, sinks: list[Tensor | None]) -> Pending | None:
        exchange = self.plan.waves[number].outward
        send = self._buffer("send out", sum(exchange.send_sizes), self._dtype)
        recv = self._buffer("recv out", sum(exchange.recv_sizes), self._dtype)
        run_moves(exchange.pack, [stack], [send])
        pending = self._transport.start(exchange, send, recv, self._steps, number, "out")
        run_moves(exchange.keep, [stack], sinks)
        return pending

    def _finish_out(
        self, wave: WavePlan, pending: Pending | None, sinks: list[Tensor | None]
    ) -> None:
        if pending is not None:
            pending.finish(self._device)
            recv = self._buffer("recv out", sum(wave.outward.recv_sizes), self._dtype)
            run_moves(wave.outward.unpack, [recv], sinks)

    def _buffer(self, purpose: str, elements: int, dtype: torch.dtype) -> Tensor:
        return self._buffers.get(purpose, elements, dtype, self._device)

    def _present(self, tensors: Mapping[str, Tensor]) -> list[str]:
        missing = [name for name in self.plan.tensors if name not in tensors]
        if missing:
            rule = f"rank {self.plan.rank} stores a piece and must pass its tensor"
            raise ConfigurationError("tensors", missing[:8], rule, "Pass every stored tensor")
        return list(self.plan.tensors)

    def _flat(self, argument: str, tensors: Mapping[str, Tensor]) -> list[Tensor | None]:
        """Return flat views by the plan's index of tensors."""
        flat: list[Tensor | None] = [None] * (
            1 + max((index for index, _ in self.plan.tensors.values()), default=-1)
        )
        for name in self._present(tensors):
            index, needed = self.plan.tensors[name]
            tensor = tensors[name].detach()
            if tensor.numel() < needed or not tensor.is_contiguous():
                rule = f"must be contiguous with at least {needed} elements"
                what = (tuple(tensor.shape), tensor.stride())
                raise ConfigurationError(f"{argument}[{name!r}]", what, rule, "Pass the shard")
            flat[index] = tensor.view(-1)
        return flat
