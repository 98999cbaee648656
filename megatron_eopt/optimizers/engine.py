"""Orthogonalizes matrices wherever they are stored: redistribute, compute, redistribute back."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base.names import TpModeT
from megatron_eopt.layouts import Buffers, Layout, Matrix, Redistribution, WaveBatch
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.optimizers.modes import Work, plan_work
from megatron_eopt.optimizers.stored import Stored, storage_layouts
from megatron_eopt.optimizers.triangle import pack_triangle, unpack_triangle

__all__ = ["DEFAULT_WAVE_BYTES", "MatrixEngine"]

DEFAULT_WAVE_BYTES = 64 << 20
"""What one owner holds of a wave, in bytes: enough to fill a GPU, little beside the weights."""

UpdateT = Callable[[Tensor, Sequence[int], ReduceT | None, tuple[int, int]], None]
"""Replaces directions by updates in place.

Called with a stack ``(batch, rows, cols)`` of equal-shaped matrices, the index of each in
:attr:`MatrixEngine.names`, how to sum over the ranks that share them (None if each is whole) and
the shape of the whole matrix.
"""


class MatrixEngine:
    """Turns stored directions into stored updates, matrix by matrix, batched by shape.

    Note [Phases of a step]
        1. Every rank packs its pieces of a wave's matrices for the ranks that compute on them;
           one all-to-all moves them.
        2. Matrices of equal shape form one stack, and ``update`` works on it in place.
        3. One all-to-all brings the results to every rank that stores a piece.
        Phase 1 of the next wave and phase 3 of the last one run while a wave is computed.
        "duplicated" has no phase 3, "distributed" and "blockwise" have neither 1 nor 3 where the
        storage is already cut the way they compute.

    Args:
        parameters: The same list in the same order on every rank of the group.
        update: The arithmetic on whole matrices (or on slabs, in mode "distributed").
        group: The ranks that store pieces of these parameters; None for one process.
        mode: Where the work happens.
        wave_bytes: Upper bound of what one owner holds of a wave.
        batched: Whether equal shapes share a call; without, every matrix is computed by itself.
        dtype: Of the stacks and of what travels; directions are rounded to it at every layout.
        device: Where the tensors live.
        buffers: Shared with other engines that never run at the same time.

    Attributes:
        names: Name of every logical matrix.
        owned: Indices of the matrices that this rank computes on, whole or in part.

    Raises:
        ConfigurationError: If the parameters' pieces do not add up to their matrices, or the ranks
            disagree about them.
    """

    def __init__(
        self,
        parameters: Sequence[Stored],
        update: UpdateT,
        group: dist.ProcessGroup | None = None,
        *,
        mode: TpModeT = "auto",
        wave_bytes: int = DEFAULT_WAVE_BYTES,
        batched: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        buffers: Buffers | None = None,
    ) -> None:
        self._group = group
        self._update = update
        self._batched = batched
        world_size = 1 if group is None else dist.get_world_size(group)
        stored: list[tuple[str, str, Layout]] = []
        for parameter in parameters:
            layouts = storage_layouts(parameter)
            for matrix, layout in zip(parameter.split.matrices, layouts, strict=True):
                name = parameter.name
                if len(layouts) > 1:
                    name = f"{name}[{matrix.name}]"
                stored.append((name, parameter.name, layout))
        self.names = tuple(name for name, _, _ in stored)
        self.shapes = tuple(layout.shape for _, _, layout in stored)
        self._work = plan_work([layout for _, _, layout in stored], world_size, mode, wave_bytes)
        matrices = [
            Matrix(name, layout, work.compute, tensor)
            for (name, tensor, layout), work in zip(stored, self._work.matrices, strict=True)
        ]
        self._redistribution = Redistribution(
            matrices,
            self._work.waves,
            group,
            dtype=dtype,
            device=device,
            name=f"Muon {mode}",
            buffers=buffers,
        )
        self._parameters = tuple(parameter.name for parameter in parameters)
        plan = self._redistribution.plan
        self._held = tuple(name in plan.tensors for name in self._parameters)
        self.owned = tuple(
            index for wave in plan.waves for batch in wave.batches for index in batch.matrices
        )

    @property
    def plan(self) -> Any:
        """The plan, for its counts of bytes and calls."""
        return self._redistribution.plan

    @property
    def work(self) -> Work:
        """Where each matrix is computed."""
        return self._work

    @torch.no_grad()
    def updates(self, directions: Sequence[Tensor]) -> list[Tensor]:
        """Return the update of every parameter's local fragment; collective over the group.

        Args:
            directions: This rank's fragment of what to orthogonalize, in the order of
                ``parameters``; any shape with ``stop - start`` elements; empty where this rank
                holds nothing.

        Returns:
            Tensors of the same shapes, in float32; never views of the directions.
        """
        inputs = {
            name: direction.contiguous()
            for name, direction, held in zip(self._parameters, directions, self._held, strict=True)
            if held
        }
        outputs = {
            name: torch.empty_like(direction, dtype=torch.float32)
            for name, direction in inputs.items()
        }
        results = self._redistribution.run(inputs, self._compute, outputs)
        return [
            results[name] if held else torch.empty_like(direction, dtype=torch.float32)
            for name, direction, held in zip(self._parameters, directions, self._held, strict=True)
        ]

    def _compute(self, batch: WaveBatch) -> None:
        first = batch.matrices[0]
        reduce = self._sum if self._work.matrices[first].shared else None
        shape = self._work.update_shape(first, batch.tensor)
        if self._batched or len(batch.matrices) == 1:
            self._update(batch.tensor, batch.matrices, reduce, shape)
            return
        for index, matrix in zip(batch.matrices, batch.tensor, strict=True):
            self._update(matrix.unsqueeze(0), (index,), reduce, shape)

    def _sum(self, tensor: Tensor) -> Tensor:
        """Sum over the group; of symmetric matrices about one triangle travels."""
        if tensor.shape[-2] == tensor.shape[-1] > 1:
            packed = pack_triangle(tensor)
            dist.all_reduce(packed, group=self._group)
            unpack_triangle(packed, tensor)
        else:
            dist.all_reduce(tensor, group=self._group)
        return tensor
