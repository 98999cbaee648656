"""State that owners keep of whole matrices, as DTensors that any other layout can load.

Saving cuts every state tensor along its first dimension over the ranks of the group; loading brings
the pieces to whichever rank owns the matrix now. Both are one redistribution.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.layouts import Layout, Matrix, Redistribution, WaveBatch
from megatron_eopt.optimizers.stored import PlacedParameter
from megatron_eopt.storage.matrix_state import MatrixStatePart

__all__ = ["OwnedState"]


@dataclass(frozen=True)
class _Entry:
    """One state tensor of one matrix.

    Attributes:
        param: The matrix's parameter.
        matrix: The matrix's index in the part.
        key: Its key in the owner's state.
        name: Its key in the state dict.
        shape: Its shape.
        owner: The rank that holds it.
    """

    param: Tensor
    matrix: int
    key: str
    name: str
    shape: tuple[int, ...]
    owner: int

    @property
    def rows_and_cols(self) -> tuple[int, int]:
        return self.shape[0], math.prod(self.shape[1:])


class OwnedState:
    """Publishes and adopts the state of a :class:`MatrixStatePart`.

    Args:
        part: The part.
        stored: How the group stores its parameters.
        params: The parameters, in the order of ``stored``.
        group: The ranks that store them; None for one.
        device: Where tensors live.
    """

    def __init__(
        self,
        part: MatrixStatePart,
        stored: Sequence[PlacedParameter],
        params: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.params = list(params)
        self._part = part
        self._group = group
        self._device = device
        self._matrices = [
            (param, f"{matrix.name}/" if len(item.split.matrices) > 1 else "")
            for param, item in zip(params, stored, strict=True)
            for matrix in item.split.matrices
        ]
        self._size = 1 if group is None else dist.get_world_size(group)
        self._rank = 0 if group is None else dist.get_rank(group)
        self._mesh = None if group is None else DeviceMesh.from_group(group, device.type)

    def follow(self, replaced: Mapping[Tensor, Tensor]) -> None:
        """Name other tensors from now on, in the place of those that are keys of ``replaced``."""
        self.params = [replaced.get(param, param) for param in self.params]
        self._matrices = [(replaced.get(param, param), name) for param, name in self._matrices]

    def publish(self) -> dict[Tensor, dict[str, Any]]:
        """Return the state of every parameter; collective over the group.

        Raises:
            ConfigurationError: If the optimizer keeps something that could not be restored.
        """
        if counters := sorted(self._part.counters):
            rule = f"are counted by {self._part.name} in its groups, of which none is saved"
            way_out = "Let it count in its state, or run without checkpoints"
            raise ConfigurationError("param_groups", counters, rule, way_out)
        entries, numbers = self._survey()
        states: dict[Tensor, dict[str, Any]] = {param: {} for param in self.params}
        for param, name, value in numbers:
            states[param][name] = value

        def read(entry: _Entry, place: Tensor) -> None:
            place.copy_(self._owned(entry).view(entry.rows_and_cols))

        pieces = self._travel(entries, read)
        for number, entry in enumerate(entries):
            states[entry.param][entry.name] = self._as_dtensor(entry, pieces[number])
        return states

    def adopt(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Take over what :meth:`publish` returned, at any number of ranks; collective.

        Raises:
            ConfigurationError: If something is missing or has another shape.
        """
        entries, numbers = self._survey()
        for name, param in [(e.name, e.param) for e in entries] + [(n, p) for p, n, _ in numbers]:
            if name not in states[param]:
                rule = f"lacks {name!r} of a parameter of shape {tuple(param.shape)}"
                raise ConfigurationError("state_dict", "incomplete", rule, "Load a complete one")
        mine = dict(self._each_owned())
        for index, (param, prefix) in enumerate(self._matrices):
            for key, value in mine.get(index, {}).items():
                if not _is_matrix(value):
                    mine[index][key] = _like(value, states[param][prefix + key])
        pieces = [self._own_piece(e, states[e.param][e.name]) for e in entries]

        def write(entry: _Entry, place: Tensor) -> None:
            self._owned(entry).copy_(place.view(entry.shape))

        self._travel(entries, write, pieces)

    def _each_owned(self) -> Iterator[tuple[int, dict[str, Any]]]:
        assert self._part.owned_state is not None
        for index, matrix in self._part.owned.items():
            yield index, self._part.owned_state[matrix]

    def _owned(self, entry: _Entry) -> Tensor:
        assert self._part.owned_state is not None
        value = self._part.owned_state[self._part.owned[entry.matrix]][entry.key]
        assert isinstance(value, Tensor)
        return value

    def _survey(self) -> tuple[list[_Entry], list[tuple[Tensor, str, Any]]]:
        """Learn from all owners what there is: tensors, and numbers with their values."""
        mine = {index: _describe(state, self._part.name) for index, state in self._each_owned()}
        everyones: list[Any] = [mine]
        if self._group is not None:
            everyones = [None] * self._size
            dist.all_gather_object(everyones, mine, group=self._group)
        entries, numbers = [], []
        for owner, described in enumerate(everyones):
            for index, items in described.items():
                param, prefix = self._matrices[index]
                for key, (shape, value) in items.items():
                    if shape is None:
                        numbers.append((param, prefix + key, value))
                    else:
                        entries.append(_Entry(param, index, key, prefix + key, shape, owner))
        return sorted(entries, key=lambda e: (e.matrix, e.key)), numbers

    def _travel(
        self,
        entries: Sequence[_Entry],
        at_owner: Callable[[_Entry, Tensor], None],
        pieces: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Bring pieces to the owners, call ``at_owner``, and return what comes back."""
        if not entries:
            return []
        matrices = [
            Matrix(
                str(number),
                Layout.slabs(e.rows_and_cols, 0, range(self._size), self._cut(e)),
                Layout.whole(e.rows_and_cols, e.owner),
            )
            for number, e in enumerate(entries)
        ]
        if pieces is None:
            pieces = [torch.zeros(self._piece(e), device=self._device) for e in entries]

        def compute(batch: WaveBatch) -> None:
            for number, place in zip(batch.matrices, batch.tensor, strict=True):
                at_owner(entries[number], place)

        # a tensor a wave: saving must not need memory for all of them
        waves = [[number] for number in range(len(entries))]
        redistribution = Redistribution(
            matrices, waves, self._group, device=self._device, name="optimizer state"
        )
        inputs = {str(number): piece for number, piece in enumerate(pieces)}
        outputs = {name: torch.zeros_like(piece) for name, piece in inputs.items()}
        redistribution.run(inputs, compute, outputs)
        return list(outputs.values())

    def _cut(self, entry: _Entry) -> list[int]:
        """Return every rank's rows, cut as torch cuts: all full but the last ones."""
        chunk = -(-entry.shape[0] // self._size)
        return [max(0, min(chunk, entry.shape[0] - r * chunk)) for r in range(self._size)]

    def _piece(self, entry: _Entry) -> tuple[int, ...]:
        return (self._cut(entry)[self._rank], *entry.shape[1:])

    def _as_dtensor(self, entry: _Entry, piece: Tensor) -> Tensor:
        if self._mesh is None:
            return piece
        stride = torch.empty(entry.shape, device="meta").stride()
        shape = torch.Size(entry.shape)
        return DTensor.from_local(
            piece, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )

    def _own_piece(self, entry: _Entry, value: Tensor) -> Tensor:
        if tuple(value.shape) != entry.shape:
            rule = f"has another shape than the {entry.shape} of {entry.name!r} here"
            raise ConfigurationError("state_dict", tuple(value.shape), rule, "Load a fitting one")
        if isinstance(value, DTensor):
            assert self._mesh is not None
            return value.redistribute(self._mesh, [Shard(0)]).to_local().contiguous()
        first = sum(self._cut(entry)[: self._rank])
        return value.narrow(0, first, self._piece(entry)[0]).contiguous()


def _is_matrix(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _describe(state: Mapping[str, Any], name: str) -> dict[str, tuple[Any, Any]]:
    """Return (shape, None) of tensors and (None, value) of numbers.

    Raises:
        ConfigurationError: For anything else, which could not be restored.
    """
    described: dict[str, tuple[Any, Any]] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.dtype == torch.float32:
            described[key] = tuple(value.shape), None
        elif isinstance(value, bool | int | float):
            described[key] = None, value
        elif isinstance(value, Tensor) and not value.dim():
            described[key] = None, value.cpu()
        else:
            rule = "can be saved only as float32 tensors and numbers"
            way_out = "Use another optimizer, or run without checkpoints"
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ConfigurationError(f"state {key!r} of {name}", kind, rule, way_out)
    return described


def _like(present: Any, loaded: Any) -> Any:
    """Return a loaded number as what the optimizer has at its place."""
    if isinstance(present, Tensor):
        return torch.as_tensor(loaded, dtype=present.dtype, device=present.device)
    return type(present)(loaded)
