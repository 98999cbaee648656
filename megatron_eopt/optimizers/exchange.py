"""Computes on whole matrices that are stored in shards: redistribute, compute, send back."""

import math
from collections import ChainMap
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass
from itertools import accumulate
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
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.optimizers.host_memory import HostMemory
from megatron_eopt.optimizers.modes import ComputePlacement, Schedule, place_matrices
from megatron_eopt.optimizers.teams import MatrixGroup
from megatron_eopt.storage.shard import ParamShard, Ranks

UpdateT = Callable[[Tensor, Sequence[int], ReduceT | None, tuple[int, int]], None]
"""Replaces directions by updates, in place.

Arguments: a stack ``(batch, rows, cols)``, the index of each matrix in
:attr:`MatrixExchange.names`, a sum over the ranks that share the matrices (None if they are whole),
the shape of a whole matrix.
"""


@dataclass
class ParamWithGrad:
    """A parameter that has a gradient in this step."""

    number: int  # index of its shard
    group: dict[str, Any]
    param: Tensor
    state: dict[str, Any]


type DirectionsT = Callable[
    [Mapping[int, ParamWithGrad], Sequence[int], Mapping[int, Tensor]], Mapping[int, Tensor]
]
"""Returns the direction of each given parameter.

Arguments: the parameters, by the number of their shards; the numbers of all shards that this wave
is the first to need, the same on all ranks, which may communicate about these; flat memory for some
of the directions, to which they may be written so that nobody copies them.
"""

type ApplyT = Callable[[Sequence[ParamWithGrad], Mapping[int, Tensor]], None]
"""Takes the updates of some parameters, by the number of their shards; shaped like directions."""


@dataclass(frozen=True)
class ExchangeConfig:
    """Settings of a MatrixExchange."""

    mode: TpModeT = "auto"  # where matrices are computed
    matrix_buffer_mb: float = DEFAULT_MATRIX_BUFFER_MB  # most MiB of a wave that one owner holds
    batched: bool = True  # whether matrices of equal shape are computed in one call
    whole_only: bool = False  # whether the algorithm cannot compute slabs of a matrix
    # dtype of stacks and of communication, to which directions are rounded at every layout
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"  # device of the tensors
    # most ranks that share a matrix in exchange mode; 1 to share none
    max_ranks_per_matrix: int = 1
    windows: tuple[int, ...] = ()  # index of the exchange of each shard; () for one
    grows: bool = False  # whether waves may exceed ``matrix_buffer_mb`` where nothing is sent

    @property
    def wave_bytes(self) -> int:
        """``matrix_buffer_mb`` in bytes."""
        return int(self.matrix_buffer_mb * 2**20)


SHARE_OF_A_WAVE = 0.25
"""Share of all matrices in a wave if nothing is sent, so that equal matrices are batched. In 16
bits, stacks and iterates then take 1.5 bytes per parameter, next to 14 of weights and state."""


class MatrixExchange:
    """Turns sharded directions into sharded updates, matrix by matrix, batched by shape.

    Note [Phases of a step]
        1. One all-to-all sends the shards of a wave's matrices to the ranks that compute them.
        2. Matrices of equal shape form one stack, which ``update`` changes in place.
        3. One all-to-all sends the results to every rank that stores a shard.
        Phase 1 of the next wave and phase 3 of the last one overlap with phase 2. "duplicated" has
        no phase 3. "distributed" and "blockwise" have neither 1 nor 3 if the storage is already
        sharded the way they compute.

    All ranks of a group store all shards and list them in the same order. ``numbers`` are the
    indices of the shards in a longer list, by which parameters, directions and updates are known.
    One that runs after another, ``before``, balances the work of both and shares its buffers.
    ``update`` is that of a rule, such as ``MuonRule._update``.

    ``operands`` are name prefixes of the tensors of a shard that are sent, side by side; the last
    one comes back. Muon has one, its direction. SOAP has gradient and weight. With ``k`` of them,
    number ``i`` of shard ``n`` is direction ``k n + i``.

    Attributes:
        names: Name of every logical matrix.
        first: Index of each shard's first matrix, by the number of the shard.
        placements: Where each matrix is computed.
        waves: The indices of matrices that are sent together, wave by wave.
        redistribution: Sends matrices to the ranks that compute them, and back.
        transposed: For each matrix, whether its rows are inputs; a stack has one kind only.
        busy: FLOPs of each rank, including exchanges before this one; float64 ``(ranks,)``.
        arrivals: For each wave, the shards that it is the first to need; the same on all ranks.
        blockwise: Whether each rank's piece counts as a matrix of its own.
        dtype: Dtype of stacks and of what is sent.

    Raises:
        ConfigurationError: If shards do not add up to their matrices, or ranks disagree on them.
    """

    def __init__(
        self,
        shards: Sequence[ParamShard],
        update: UpdateT,
        config: ExchangeConfig | None = None,
        *,
        numbers: Sequence[int] | None = None,
        before: "MatrixExchange | None" = None,
        operands: Sequence[str] = ("",),
    ) -> None:
        config = config or ExchangeConfig()
        self.ranks: Ranks = shards[0].ranks
        self.device = torch.device(config.device)
        self.blockwise = config.mode == "blockwise" and self.ranks.size > 1
        self._update = update
        self._batched = config.batched
        self.dtype = config.dtype
        numbers = range(len(shards)) if numbers is None else numbers
        self._shards = dict(zip(numbers, shards, strict=True))
        count = self._operands = len(operands)
        self._number_of = {
            kind + shard.name: count * number + i
            for number, shard in self._shards.items()
            for i, kind in enumerate(operands)
        }
        self._shard_of = {name: number // count for name, number in self._number_of.items()}
        layouts = [layout for shard in shards for layout in shard.layouts]
        self.names = tuple(name for shard in shards for name in shard.matrix_names)
        counts = accumulate((len(shard.layouts) for shard in shards), initial=0)
        self.first = dict(zip(self._shards, counts, strict=False))
        wave_bytes = config.wave_bytes
        if config.grows and self.ranks.size == 1:
            # where nothing is sent, larger waves cost memory only, and batches need fewer kernels
            elements = sum(math.prod(layout.shape) for layout in layouts)
            share = int(SHARE_OF_A_WAVE * elements * config.dtype.itemsize)
            wave_bytes = max(wave_bytes, share)
        self.placements, self.waves = place_matrices(
            layouts,
            # else every exchange would give its most expensive matrix to rank 0
            self.ranks.size if before is None else before.busy,
            config.mode,
            wave_bytes // count,
            whole_only=config.whole_only,
            max_ranks_per_matrix=config.max_ranks_per_matrix,
            element_size=config.dtype.itemsize,
        )
        self._reduce_of = _sums_over(self.placements, self.ranks)
        self._shapes = [item.compute.shape for item in self.placements]
        self.transposed = [s.split.transposed for s in shards for _ in s.layouts]
        shard_of = [n for n, shard in self._shards.items() for _ in shard.layouts]
        stored_in = [self._shards[n].name for n in shard_of]
        self.redistribution = Redistribution(
            [
                Matrix(
                    kind + name,
                    layout,
                    placed.compute,
                    kind + tensor,
                    returns=kind == operands[-1],
                    kind=(placed.kind, transposed),
                )
                for name, layout, placed, tensor, transposed in zip(
                    self.names,
                    layouts,
                    self.placements,
                    stored_in,
                    self.transposed,
                    strict=True,
                )
                for kind in operands
            ],
            [[count * matrix + i for matrix in wave for i in range(count)] for wave in self.waves],
            self.ranks.group,
            dtype=config.dtype,
            device=config.device,
            name=f"{config.mode} of {self.names[0]} and {len(self.names) - 1} more",
        )
        self.busy: Float64Array = np.array(self.schedule.loads)
        # for the directions of the next wave
        self._side: SideStream = SideStream() if before is None else before._side
        if before is not None:
            self.busy += before.busy
            # they run one after the other, so the largest needs of all are enough
            self.redistribution.buffers = before.redistribution.buffers
        self.arrivals: list[list[int]] = first_uses(
            sorted({shard_of[matrix] for matrix in wave}) for wave in self.waves
        )

    @property
    def sharing(self) -> dist.ProcessGroup | None:
        """The ranks that store parts of the same matrices; None if each has matrices of its own."""
        return None if self.blockwise else self.ranks.group

    @property
    def schedule(self) -> Schedule:
        """Which rank computes which matrices, and what is sent."""
        storage = [layout for shard in self._shards.values() for layout in shard.layouts]
        plan = self.redistribution.plan
        return Schedule(self.ranks, self.names, storage, self.placements, plan, self._operands)

    def out_in(self, matrix: int, shape: tuple[int, int]) -> tuple[int, int]:
        """Return outputs and inputs of a matrix of this ``shape``, which determine its scale."""
        return (shape[1], shape[0]) if self.transposed[matrix] else shape

    @torch.no_grad()
    def run(
        self,
        items: Mapping[int, ParamWithGrad],
        directions: DirectionsT,
        apply: ApplyT,
        host: HostMemory | None = None,
        *,
        keep: bool = False,
        owned: Mapping[int, Tensor] | None = None,
        owned_state: MutableMapping[Tensor, dict[str, Any]] | None = None,
    ) -> None:
        """Get directions and hand out their updates, wave by wave; collective over the group.

        Args:
            items: The parameters to update, by the number of their shards.
            directions: See :data:`DirectionsT`; called for each wave, also without parameters.
            apply: See :data:`ApplyT`; called with each parameter's whole update.
            host: Keeps weights and state in host memory, except while ``directions`` and ``apply``
                get them.
            keep: Whether updates are new tensors, which later waves do not overwrite.
            owned: What has the state of matrices that this rank computes, by their index.
            owned_state: That state, which ``host`` moves while the matrices are computed.
        """

        def load(wave: int, names: Sequence[str]) -> dict[str, Tensor]:
            members = {n: items[n] for name in names if (n := self._shard_of[name]) in items}
            outs: dict[int, Tensor] = {}
            for n in () if keep else members:
                if (place := self.redistribution.place(self._shards[n].name)) is not None:
                    outs[n] = place
            found = directions(members, self.arrivals[wave], outs)
            return {name: self._input_of(self._number_of[name], found) for name in names}

        def store(results: Mapping[str, Tensor]) -> None:
            updates = {self._shard_of[name]: update for name, update in results.items()}
            # others took part with zeros, because the plan is fixed; they must not change
            updates = {n: update for n, update in updates.items() if n in items}
            apply([items[n] for n in updates], updates)

        if host is None:
            self.redistribution.run(load, self.compute, store, self._side)
            return

        def params_of(names: Iterable[str]) -> list[Tensor]:
            numbers = dict.fromkeys(self._shard_of[name] for name in names)
            return [items[n].param for n in numbers if n in items]

        def owned_of(indices: Sequence[int]) -> list[Tensor]:
            matrices = dict.fromkeys(index // self._operands for index in indices)
            return [owned[matrix] for matrix in matrices] if owned else []

        # not copied, because an optimizer may replace the state of a matrix
        state = ChainMap({item.param: item.state for item in items.values()}, owned_state or {})
        # off-loaded tensors have streams of their own
        host.run_waves(self.redistribution, load, self.compute, store, params_of, owned_of, state)

    def _input_of(self, number: int, directions: Mapping[int, Tensor]) -> Tensor:
        """Return what is sent of a tensor: the direction, or zeros if there is none."""
        if number in directions:
            return directions[number].contiguous()
        # of any dtype, because packing converts
        shape = self._shards[number // self._operands].shape
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    def updates(self, directions: Sequence[Tensor]) -> list[Tensor]:
        """Return every shard's update, float32 in the shape of its direction; collective.

        Directions may have any shape, with as many elements as this rank's shard.
        """
        names = list(self._number_of)
        inputs = {n: d.float().contiguous() for n, d in zip(names, directions, strict=True)}
        results: dict[str, Tensor] = {}
        with torch.no_grad():
            self.redistribution.run(
                lambda _, wanted: {n: inputs[n] for n in wanted}, self.compute, results.update
            )
        return [
            # a rank that stores nothing of a shard gets no result for it
            results[name] if name in results else torch.zeros_like(d, dtype=torch.float32)
            for name, d in zip(names, directions, strict=True)
        ]

    def compute(self, batch: WaveBatch) -> None:
        """Replace a batch's directions by updates, as :class:`Redistribution` asks."""
        count = self._operands
        # a batch has the operands of each matrix side by side
        matrices = [index // count for index in batch.matrices[::count]]
        reduce = self._reduce_of[matrices[0]]
        rows, cols = batch.tensor.shape[-2:]
        # in blockwise mode, a piece is scaled as a matrix of its own
        shape = (rows, cols) if self.blockwise else self._shapes[matrices[0]]
        most = len(matrices) if self._batched else 1  # in one call
        for first in range(0, len(matrices), most):
            stack = batch.tensor[count * first : count * (first + most)]
            self._update(stack, matrices[first : first + most], reduce, shape)


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


def _sums_over(placements: Sequence[ComputePlacement], ranks: Ranks) -> list[ReduceT | None]:
    """Return what sums over the ranks that share each matrix; None if no other rank does."""
    if ranks.group is None:
        return [None] * len(placements)
    members = dist.get_process_group_ranks(ranks.group)
    teams = {p.group for p in placements if p.mode == "exchange" and ranks.rank in p.group}
    # a rank has at most one team of each size, so members create each group at the same time
    sums: dict[MatrixGroup, ReduceT] = {
        team: _Team(group_of_members([members[rank] for rank in team]))
        for team in sorted(teams, key=len)
    }
    everyone = _Sum(ranks.group)
    return [everyone if p.mode == "distributed" else sums.get(p.group) for p in placements]
