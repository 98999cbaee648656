"""State of whole matrices on owner ranks, as all ranks save and load it."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Shard as ShardPlacement

from megatron_eopt.base.agreement import gather_objects
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.optimizers.update_rule import ParamGroup, State, UnshardedState
from megatron_eopt.optimizers.whole_matrix_rule import WholeMatrixRule


@dataclass(frozen=True)
class OwnerEntry:
    """One state value of one matrix, as all ranks know it."""

    shard: int  # index of the parameter's shard
    name: str  # its key in the state dict
    owner: int  # the rank that holds it
    shape: tuple[int, ...] | None  # None for a number
    number: Any
    problem: str  # the type that cannot be restored; empty if it can


class WholeMatrixState:
    """Publishes and loads the state that one update rule's owner ranks keep."""

    def __init__(self, update_rule: WholeMatrixRule, device: torch.device) -> None:
        self._rule = update_rule
        self._device = device
        self._ranks = update_rule.shards[0].ranks
        group = self._ranks.group
        # state dicts show this state as DTensors, which need a mesh
        self._mesh = None if group is None else DeviceMesh.from_group(group, device.type)

    def entries(self, groups: Sequence[ParamGroup], state: State) -> list[list[OwnerEntry]]:
        """Return every parameter's state that owners have so far; collective."""
        by_shard: list[list[OwnerEntry]] = [[] for _ in self._rule.shards]
        for entry in self._survey(groups, state)[1]:
            by_shard[entry.shard].append(entry)
        return by_shard

    def publish(self, groups: Sequence[ParamGroup], state: State) -> list[dict[str, Any]]:
        """Return the state of every parameter, in the order of shards; collective over the group.

        Raises:
            ConfigurationError: On all ranks, if an owner's state cannot be restored.
        """
        owned, entries = self._survey(groups, state)
        if problems := [entry for entry in entries if entry.problem]:
            argument = f"state {problems[0].name!r} of {self._rule.name}"
            rule = "only float32 tensors and numbers can be saved"
            hint = "Use another optimizer, or run without checkpoints"
            raise ConfigurationError(argument, problems[0].problem, rule, hint)
        states: list[dict[str, Any]] = [{} for _ in self._rule.shards]
        for entry in entries:
            value = entry.number
            if entry.shape is not None:
                item = owned.get((entry.shard, entry.name))
                # entries have the same order on all ranks, and each is one collective
                value = self._cut(entry, torch.empty(0) if item is None else item.value)
            states[entry.shard][entry.name] = value
        return states

    def load(
        self, groups: Sequence[ParamGroup], state: State, saved: Sequence[Mapping[str, Any]]
    ) -> None:
        """Load what :meth:`publish` returned on any number of ranks; collective.

        State that is not in ``saved``, the same on all ranks, does not change.
        """
        owned, entries = self._survey(groups, state)
        for entry in entries:
            if entry.name not in saved[entry.shard]:
                continue
            value = saved[entry.shard][entry.name]
            if isinstance(value, DTensor):
                # also on ranks that do not own it, because the gather is collective
                value = value.full_tensor()
            if (entry.shard, entry.name) in owned:
                owned[entry.shard, entry.name].replace(value)

    def counts(self) -> Iterator[UnshardedState]:
        """Return the step counts of the matrices that this rank owns."""
        return self._rule.counts()

    def _survey(
        self, groups: Sequence[ParamGroup], state: State
    ) -> tuple[dict[tuple[int, str], UnshardedState], list[OwnerEntry]]:
        """Return the state that this rank owns, and entries of all ranks; collective."""
        items = (*self._rule.unsharded_state(groups, state), *self._rule.counts())
        owned = {(item.shard, self._name(item)): item for item in items}
        entries = [
            _describe(shard, name, self._ranks.rank, item.value)
            for (shard, name), item in owned.items()
        ]
        of_all = itertools.chain(*gather_objects(entries, self._ranks.group))
        return owned, sorted(of_all, key=lambda entry: (entry.shard, entry.name))

    def _name(self, item: UnshardedState) -> str:
        matrices = self._rule.shards[item.shard].split.matrices
        prefix = (matrices[item.matrix].name,) if len(matrices) > 1 else ()
        return "/".join((*prefix, *item.path))

    def _cut(self, entry: OwnerEntry, whole: Tensor) -> Tensor:
        """Return this rank's rows of a tensor that only its owner passes; collective."""
        if self._mesh is None:
            return whole.clone()
        if entry.owner != self._ranks.rank:
            assert entry.shape is not None
            whole = torch.empty(entry.shape, dtype=torch.float32, device=self._device)
        # `src_data_rank` counts within the mesh's group, as owners do
        rows = [ShardPlacement(0)]
        return distribute_tensor(whole, self._mesh, rows, src_data_rank=entry.owner)


def _describe(shard: int, name: str, owner: int, value: Any) -> OwnerEntry:
    is_tensor = isinstance(value, Tensor)
    if is_tensor and value.dim():
        problem = "" if value.dtype == torch.float32 else str(value.dtype)
        return OwnerEntry(shard, name, owner, tuple(value.shape), None, problem)
    problem = "" if is_tensor or isinstance(value, bool | int | float) else type(value).__name__
    number = value.cpu() if is_tensor else value
    return OwnerEntry(shard, name, owner, None, None if problem else number, problem)
