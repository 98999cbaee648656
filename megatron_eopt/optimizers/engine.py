"""Computes on whole matrices that are stored in shards: redistribute, compute, send back."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base.agreement import group_of_members
from megatron_eopt.base.gpu import SideStream
from megatron_eopt.base.names import DEFAULT_MATRIX_BUFFER_MB, TpModeT
from megatron_eopt.layouts import Matrix, Redistribution, WaveBatch
from megatron_eopt.layouts.assignment import Float64Array, first_uses
from megatron_eopt.layouts.redistribution import LoadT, StoreT
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.optimizers.modes import Schedule, Work, plan_work
from megatron_eopt.optimizers.teams import Team
from megatron_eopt.storage.shard import ParamShard, Ranks

UpdateT = Callable[[Tensor, Sequence[int], ReduceT | None, tuple[int, int]], None]
"""Replaces directions by updates, in place.

Arguments: a stack ``(batch, rows, cols)``, the index of each matrix in :attr:`MatrixEngine.names`,
a sum over the ranks that share the matrices (None if they are whole), the shape of a whole matrix.
"""


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine."""

    mode: TpModeT = "auto"  # where matrices are computed
    matrix_buffer_mb: float = DEFAULT_MATRIX_BUFFER_MB  # most MiB of a wave that one owner holds
    batched: bool = True  # whether matrices of equal shape are computed in one call
    whole_only: bool = False  # whether the algorithm cannot compute slabs of a matrix
    # dtype of stacks and of communication, to which directions are rounded at every layout
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"  # device of the tensors
    # most ranks that share a matrix in exchange mode; 1 to share none
    max_ranks_per_matrix: int = 1
    windows: tuple[int, ...] = ()  # index of the engine that computes each shard; () for one
    grows: bool = False  # whether waves may exceed ``matrix_buffer_mb`` where nothing is sent

    @property
    def wave_bytes(self) -> int:
        """``matrix_buffer_mb`` in bytes."""
        return int(self.matrix_buffer_mb * 2**20)


SHARE_OF_A_WAVE = 0.25
"""Share of all matrices in a wave if nothing is sent, so that equal matrices are batched. In 16
bits, stacks and iterates then take 1.5 bytes per parameter, next to 14 of weights and state."""


class MatrixEngine:
    """Turns sharded directions into sharded updates, matrix by matrix, batched by shape.

    Note [Phases of a step]
        1. One all-to-all sends the shards of a wave's matrices to the ranks that compute them.
        2. Matrices of equal shape form one stack, which ``update`` changes in place.
        3. One all-to-all sends the results to every rank that stores a shard.
        Phase 1 of the next wave and phase 3 of the last one overlap with phase 2. "duplicated" has
        no phase 3. "distributed" and "blockwise" have neither 1 nor 3 if the storage is already
        sharded the way they compute.

    All ranks of a group store all shards and list them in the same order. An engine that runs after
    another one, ``before``, balances the work of both and shares its buffers. ``update`` is that of
    a rule, such as ``MuonRule._update``.

    Attributes:
        names: Name of every logical matrix.
        first: Index of each shard's first matrix, then the number of matrices.
        work: Where each matrix is computed.
        redistribution: Sends matrices to the ranks that compute them, and back.
        transposed: For each matrix, whether its rows are inputs; a stack has one kind only.
        busy: FLOPs of each rank, including engines before this one; float64 ``(ranks,)``.
        arrivals: For each wave, the shards that it is the first to need; the same on all ranks.
        blockwise: Whether each rank's piece counts as a matrix of its own.
        dtype: Dtype of stacks and of what is sent.
        wave_elements: Most elements of a wave that one owner holds.
        skipped: Matrices that the next runs leave as they are; the same on all ranks.

    Raises:
        ConfigurationError: If shards do not add up to their matrices, or ranks disagree on them.
    """

    def __init__(
        self,
        shards: Sequence[ParamShard],
        update: UpdateT,
        engine_config: EngineConfig | None = None,
        *,
        before: "MatrixEngine | None" = None,
    ) -> None:
        engine_config = engine_config or EngineConfig()
        self.ranks: Ranks = shards[0].ranks
        self.device = torch.device(engine_config.device)
        self.blockwise = engine_config.mode == "blockwise" and self.ranks.size > 1
        self.skipped: Collection[int] = frozenset()
        self._update = update
        self._batched = engine_config.batched
        self.dtype = engine_config.dtype
        self.wave_elements = engine_config.wave_bytes // engine_config.dtype.itemsize
        self._shards = list(shards)
        layouts = [layout for shard in shards for layout in shard.layouts]
        self.names = tuple(name for shard in shards for name in shard.matrix_names)
        self.first = [0, *accumulate(len(shard.layouts) for shard in shards)]
        wave_bytes = engine_config.wave_bytes
        if engine_config.grows and self.ranks.size == 1:
            # where nothing is sent, larger waves cost memory only, and batches need fewer kernels
            elements = sum(math.prod(layout.shape) for layout in layouts)
            share = int(SHARE_OF_A_WAVE * elements * engine_config.dtype.itemsize)
            wave_bytes = max(wave_bytes, share)
        self.work: Work = plan_work(
            layouts,
            # else every engine would give its most expensive matrix to rank 0
            self.ranks.size if before is None else before.busy,
            engine_config.mode,
            wave_bytes,
            whole_only=engine_config.whole_only,
            max_ranks_per_matrix=engine_config.max_ranks_per_matrix,
            element_size=engine_config.dtype.itemsize,
        )
        # the empty team stands for the whole group, which shares the matrices of "distributed"
        sums = _sums_of({item.team for item in self.work.matrices}, self.ranks)
        self._reduce_of: list[ReduceT | None] = [
            sums.get(item.team) if item.team or item.shared else None for item in self.work.matrices
        ]
        self._shapes = [item.compute.shape for item in self.work.matrices]
        self.transposed = [s.split.transposed for s in shards for _ in s.layouts]
        shard_of = [n for n, shard in enumerate(shards) for _ in shard.layouts]
        stored_in = [shards[n].name for n in shard_of]
        self.redistribution = Redistribution(
            [
                Matrix(name, layout, work.compute, tensor, kind=(work.kind, transposed))
                for name, layout, work, tensor, transposed in zip(
                    self.names,
                    layouts,
                    self.work.matrices,
                    stored_in,
                    self.transposed,
                    strict=True,
                )
            ],
            self.work.waves,
            self.ranks.group,
            dtype=engine_config.dtype,
            device=engine_config.device,
            name=f"Muon {engine_config.mode}",
        )
        self.busy: Float64Array = np.array(self.schedule.loads)
        if before is not None:
            self.busy += before.busy
            # engines run one after the other, so the largest needs of all are enough
            self.redistribution.buffers = before.redistribution.buffers
        self.arrivals: list[list[int]] = first_uses(
            sorted({shard_of[matrix] for matrix in wave}) for wave in self.work.waves
        )

    @property
    def sharing(self) -> dist.ProcessGroup | None:
        """The ranks that store parts of the same matrices; None if each has matrices of its own."""
        return None if self.blockwise else self.ranks.group

    @property
    def schedule(self) -> Schedule:
        """Which rank computes which matrices, and what is sent."""
        storage = [layout for shard in self._shards for layout in shard.layouts]
        return Schedule(self.ranks, self.names, storage, self.work, self.redistribution.plan)

    def out_in(self, matrix: int, shape: tuple[int, int]) -> tuple[int, int]:
        """Return outputs and inputs of a matrix of this ``shape``, which determine its scale."""
        return (shape[1], shape[0]) if self.transposed[matrix] else shape

    @torch.no_grad()
    def run(self, load: LoadT, store: StoreT, side: SideStream | None = None) -> None:
        """Compute all matrices wave by wave; collective over the group.

        ``load`` returns contiguous directions by shard name. ``store`` takes their updates, in the
        same shapes and dtypes. ``side`` is as in :meth:`Redistribution.run`.
        """
        self.redistribution.run(load, self.compute, store, side)

    def updates(self, directions: Sequence[Tensor]) -> list[Tensor]:
        """Return every shard's update, float32 in the shape of its direction; collective.

        Directions may have any shape, with as many elements as this rank's shard.
        """
        names = [shard.name for shard in self._shards]
        inputs = {n: d.float().contiguous() for n, d in zip(names, directions, strict=True)}
        results: dict[str, Tensor] = {}
        self.run(lambda _, wanted: {name: inputs[name] for name in wanted}, results.update)
        return [
            # a rank that stores nothing of a shard gets no result for it
            results[name] if name in results else torch.zeros_like(d, dtype=torch.float32)
            for name, d in zip(names, directions, strict=True)
        ]

    def compute_alone(self, stack: Tensor, matrices: Sequence[int]) -> None:
        """Replace a stack ``(batch, rows, cols)`` of whole matrices by updates; on this rank."""
        rows, cols = stack.shape[-2:]
        self._update(stack, matrices, None, (rows, cols))

    def most_in_stack(self, shape: tuple[int, int]) -> int:
        """Return how many matrices of a shape one rank may compute in one call."""
        if self.blockwise or not self._batched:
            return 1
        return max(1, self.wave_elements // math.prod(shape))

    def compute(self, batch: WaveBatch) -> None:
        """Replace a batch's directions by updates, as :class:`Redistribution` asks."""
        first = batch.matrices[0]
        reduce = self._reduce_of[first]
        rows, cols = batch.tensor.shape[-2:]
        # in blockwise mode, a piece is scaled as a matrix of its own
        shape = (rows, cols) if self.blockwise else self._shapes[first]
        for part in self._left_of(batch) if self.skipped else (batch,):
            if self._batched or len(part.matrices) == 1:
                self._update(part.tensor, part.matrices, reduce, shape)
                continue
            for index, matrix in zip(part.matrices, part.tensor, strict=True):
                self._update(matrix.unsqueeze(0), (index,), reduce, shape)

    def _left_of(self, batch: WaveBatch) -> Iterator[WaveBatch]:
        """Yield the parts of a batch without skipped matrices.

        These were computed before the step (step_checks.py), which also puts in their updates. Runs
        of neighbours are views of the stack, others would be copies.
        """
        computed = [matrix not in self.skipped for matrix in batch.matrices]
        for is_computed, places in groupby(range(len(computed)), computed.__getitem__):
            if is_computed:
                # twice, so that a run of one has a first and a last, too
                first, *_, last = (*places,) * 2
                matrices = batch.matrices[first : last + 1]
                yield WaveBatch(matrices, batch.tensor[first : last + 1])


class _Sum:
    """Sums tensors over the ranks of a group, in place."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def __call__(self, tensor: Tensor) -> Tensor:
        """Sum one tensor."""
        # not asynchronous, because the next product needs the sum
        dist.all_reduce(tensor, group=self._group)
        return tensor


class _Team(_Sum):
    """Also divides the rows of small matrices over the ranks of a team."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    def rows(self, m: int) -> tuple[int, int]:
        """Return the first of ``m`` rows that this rank computes, and one past its last."""
        # no row is left over, because `teams._cost` allows only sizes that divide
        height = m // self._size
        return self._rank * height, (self._rank + 1) * height

    def gather(self, block: Tensor) -> Tensor:
        """Return whole matrices, gathered from all ranks' rows."""
        rows = block.new_empty(self._size * block.numel())
        dist.all_gather_into_tensor(rows, block.flatten(), group=self._group)
        # the collective puts ranks outermost; in a batch, each matrix's rows belong together
        by_rank = rows.view(self._size, *block.shape)
        return by_rank.movedim(0, -3).reshape(*block.shape[:-2], -1, block.shape[-1])


def _sums_of(teams: Collection[Team], ranks: Ranks) -> dict[Team, _Sum]:
    """Return sums over each team of this rank and, under ``()``, over the whole group."""
    if ranks.group is None:
        return {}
    members = dist.get_process_group_ranks(ranks.group)
    mine = [team for team in teams if ranks.rank in team]
    # a rank has at most one team of each size, so members create each group at the same time
    groups: dict[Team, Any] = {
        team: group_of_members([members[rank] for rank in team]) for team in sorted(mine, key=len)
    }
    return {(): _Sum(ranks.group), **{team: _Team(group) for team, group in groups.items()}}
