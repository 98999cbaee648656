"""State that owners keep of whole matrices, as DTensors that any other layout can load.

Saving cuts every state tensor along its first dimension over the ranks of the group; loading brings
the pieces to whichever rank owns the matrix now. Both are one redistribution.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard as ShardPlacement

from megatron_eopt.base.agreement import of_every_rank
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.layouts import Layout, Matrix, Redistribution, WaveBatch
from megatron_eopt.optimizers.driver import Kept, ParamGroup, State
from megatron_eopt.optimizers.owner_driver import OwnerDriver


@dataclass(frozen=True)
class _Entry:
    """One value of state of one matrix, as all ranks know it.

    Attributes:
        shard: Number of the parameter's shard.
        name: Its key in the state dict.
        owner: The rank that holds it.
        shape: Its shape; None for a number.
        number: The number.
        problem: Why it could not be restored; empty if it could.
    """

    shard: int
    name: str
    owner: int
    shape: tuple[int, ...] | None
    number: Any = None
    problem: str = ""

    @property
    def rows_and_cols(self) -> tuple[int, int]:
        assert self.shape is not None
        return self.shape[0], math.prod(self.shape[1:])


class OwnedTensors:
    """Publishes and adopts the state that one driver's owners keep.

    Args:
        driver: The driver.
        device: Where tensors live.
    """

    def __init__(self, driver: OwnerDriver, device: torch.device) -> None:
        self._driver = driver
        self._device = device
        self._ranks = driver.shards[0].ranks
        group = self._ranks.group
        self._mesh = None if group is None else DeviceMesh.from_group(group, device.type)

    def publish(self, groups: Sequence[ParamGroup], state: State) -> list[dict[str, Any]]:
        """Return the state of every parameter, in the order of shards; collective over the group.

        Raises:
            ConfigurationError: On all ranks, if an owner keeps something that could not be
                restored.
        """
        kept, entries = self._survey(groups, state)
        states: list[dict[str, Any]] = [{} for _ in self._driver.shards]
        for entry in entries:
            if entry.shape is None:
                states[entry.shard][entry.name] = entry.number
        tensors = [entry for entry in entries if entry.shape is not None]

        def read(entry: _Entry, place: Tensor) -> None:
            place.copy_(kept[entry.shard, entry.name].value.view(entry.rows_and_cols))

        for entry, piece in zip(tensors, self._travel(tensors, read), strict=True):
            states[entry.shard][entry.name] = self._as_dtensor(entry, piece)
        return states

    def adopt(
        self, groups: Sequence[ParamGroup], state: State, saved: Sequence[Mapping[str, Any]]
    ) -> None:
        """Take over what :meth:`publish` returned, at any number of ranks; collective.

        Raises:
            ConfigurationError: On all ranks, if something is missing or has another shape.
        """
        kept, entries = self._survey(groups, state)
        self._agree([p for entry in entries if (p := self._misfit(entry, saved[entry.shard]))])
        for (shard, name), item in kept.items():
            if not _is_matrix(item.value):
                item.replace(saved[shard][name])
        tensors = [entry for entry in entries if entry.shape is not None]
        pieces = [self._own_piece(entry, saved[entry.shard][entry.name]) for entry in tensors]

        def write(entry: _Entry, place: Tensor) -> None:
            kept[entry.shard, entry.name].replace(place)

        self._travel(tensors, write, pieces)

    def _survey(
        self, groups: Sequence[ParamGroup], state: State
    ) -> tuple[dict[tuple[int, str], Kept], list[_Entry]]:
        """Return what this rank keeps, and what all owners do."""
        found = (*self._driver.kept(groups, state), *self._driver.counts())
        kept = {(item.shard, self._name(item)): item for item in found}
        mine = [
            _describe(shard, name, self._ranks.rank, item.value)
            for (shard, name), item in kept.items()
        ]
        known = [entry for entries in of_every_rank(mine, self._ranks.group) for entry in entries]
        if problems := [entry for entry in known if entry.problem]:
            raise ConfigurationError(
                f"state {problems[0].name!r} of {self._driver.name}",
                problems[0].problem,
                "can be saved only as float32 tensors and numbers",
                "Use another optimizer, or run without checkpoints",
            )
        return kept, sorted(known, key=lambda entry: (entry.shard, entry.name))

    def _name(self, item: Kept) -> str:
        matrices = self._driver.shards[item.shard].split.matrices
        prefix = (matrices[item.matrix].name,) if len(matrices) > 1 else ()
        return "/".join((*prefix, *item.path))

    def _misfit(self, entry: _Entry, saved: Mapping[str, Any]) -> str:
        name = self._driver.shards[entry.shard].name
        if entry.name not in saved:
            return f"lacks {entry.name!r} of {name}"
        shape = tuple(getattr(saved[entry.name], "shape", ()))
        if entry.shape is not None and shape != entry.shape:
            return f"has the shape {shape} and not {entry.shape} for {entry.name!r} of {name}"
        return ""

    def _agree(self, problems: Sequence[str]) -> None:
        known = of_every_rank(list(problems), self._ranks.group)
        if any(known):
            found = sorted({problem for some in known for problem in some})
            raise ConfigurationError(
                "state_dict", "incomplete", found[0], "Load what this optimizer saved"
            )

    def _travel(
        self,
        entries: Sequence[_Entry],
        at_owner: Callable[[_Entry, Tensor], None],
        pieces: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Bring pieces to the owners, call ``at_owner``, and return what comes back."""
        if not entries:
            return []
        ranks = range(self._ranks.size)
        matrices = [
            Matrix(
                str(number),
                Layout.slabs(entry.rows_and_cols, 0, ranks, self._cut(entry)),
                Layout.whole(entry.rows_and_cols, entry.owner),
            )
            for number, entry in enumerate(entries)
        ]
        if pieces is None:
            pieces = [torch.zeros(self._piece(entry), device=self._device) for entry in entries]

        def compute(batch: WaveBatch) -> None:
            for number, place in zip(batch.matrices, batch.tensor, strict=True):
                at_owner(entries[number], place)

        # a tensor a wave: saving must not need memory for all of them
        waves = [[number] for number in range(len(entries))]
        redistribution = Redistribution(
            matrices, waves, self._ranks.group, device=self._device, name="optimizer state"
        )
        inputs = {str(number): piece for number, piece in enumerate(pieces)}
        outputs = {name: torch.zeros_like(piece) for name, piece in inputs.items()}
        redistribution.run(inputs, compute, outputs)
        return list(outputs.values())

    def _cut(self, entry: _Entry) -> list[int]:
        """Return every rank's rows, cut as torch cuts: all full but the last ones."""
        rows = entry.rows_and_cols[0]
        chunk = -(-rows // self._ranks.size)
        return [max(0, min(chunk, rows - rank * chunk)) for rank in range(self._ranks.size)]

    def _piece(self, entry: _Entry) -> tuple[int, ...]:
        assert entry.shape is not None
        return (self._cut(entry)[self._ranks.rank], *entry.shape[1:])

    def _as_dtensor(self, entry: _Entry, piece: Tensor) -> Tensor:
        if self._mesh is None:
            return piece
        assert entry.shape is not None
        stride = torch.empty(entry.shape, device="meta").stride()
        return DTensor.from_local(
            piece,
            self._mesh,
            [ShardPlacement(0)],
            run_check=False,
            shape=torch.Size(entry.shape),
            stride=stride,
        )

    def _own_piece(self, entry: _Entry, value: Tensor) -> Tensor:
        if isinstance(value, DTensor):
            assert self._mesh is not None
            return value.redistribute(self._mesh, [ShardPlacement(0)]).to_local().contiguous()
        first = sum(self._cut(entry)[: self._ranks.rank])
        return value.narrow(0, first, self._piece(entry)[0]).contiguous()


def _is_matrix(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _describe(shard: int, name: str, owner: int, value: Any) -> _Entry:
    if _is_matrix(value) and value.dtype == torch.float32:
        return _Entry(shard, name, owner, tuple(value.shape))
    if isinstance(value, bool | int | float):
        return _Entry(shard, name, owner, None, value)
    if isinstance(value, Tensor) and not value.dim():
        return _Entry(shard, name, owner, None, value.cpu())
    kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
    return _Entry(shard, name, owner, None, problem=str(kind))
