"""What an optimizer saves, what it asks a checkpoint for, and how both fit together."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import MATRIX_STATE_PREFIX, STATE_PREFIX, STEP
from megatron_eopt.storage.checkpoint.bucket_space import BucketSpace
from megatron_eopt.storage.checkpoint.keys import keys
from megatron_eopt.storage.checkpoint.leaves import put
from megatron_eopt.storage.checkpoint.model_space import Box, ModelSpace
from megatron_eopt.storage.checkpoint.sources import Index, Sources

__all__ = ["REQUESTS", "Rest", "StateRequests", "Wanted"]

REQUESTS = "requests"
"""Key under which a sharded state dict that is about to be loaded has its requests."""


@dataclass(frozen=True)
class Rest:
    """State of a whole matrix that is not of its shape.

    Attributes:
        name: The matrix, as part of the checkpoint's keys.
        leaves: Kind of state to the dictionary it is in, the path to it there, and its value.
    """

    name: str
    leaves: Mapping[str, tuple[dict[str, Any], str, Any]]

    def request(self, kind: str, instance: int) -> ShardedTensor | ShardedObject:
        """Return what is saved of one kind of state."""
        key, value = f"{MATRIX_STATE_PREFIX}{kind}.{self.name}", self.leaves[kind][2]
        replica = (0, 0, instance)
        if isinstance(value, Tensor):
            # a tensor in a checkpoint has at least one dimension
            data = value.detach().view(value.shape or (1,))
            return ShardedTensor.from_rank_offsets(key, data, replica_id=replica)
        return ShardedObject(key, value, (1,), (0,), replica_id=replica)

    def there(self, available: frozenset[str]) -> set[str]:
        """Return which kinds of this state a checkpoint has."""
        return {
            kind
            for kind in self.leaves
            if not available.isdisjoint(_spellings(f"{MATRIX_STATE_PREFIX}{kind}.{self.name}"))
        }

    def take(self, loaded: Mapping[str, Any]) -> None:
        """Write loaded values to the state."""
        for kind, value in loaded.items():
            container, path, present = self.leaves[kind]
            if isinstance(present, Tensor):
                _copy(present, value)
            else:
                put(container, path, type(present)(value))


@dataclass(frozen=True)
class Wanted:
    """State that this rank holds: of a fragment of a parameter, or of a whole matrix.

    Attributes:
        space: Where the parameter lies in a checkpoint.
        boxes: The parts of it that are held.
        tensors: Kind of state to its values, of which ``boxes`` are views.
        param: The model's parameter if this is a fragment of it.
        rest: Further state, of a matrix.
    """

    space: ModelSpace
    boxes: Sequence[Box]
    tensors: Mapping[str, Tensor]
    param: Tensor | None = None
    rest: Rest | None = None

    def take_step(self, steps: int) -> None:
        """Set the counter of steps, if there is one."""
        if self.rest is not None and STEP in self.rest.leaves:
            self.rest.take({STEP: torch.tensor(steps)})


class StateRequests:
    """The part of a sharded state dict that holds the parameters' state.

    Args:
        wanted: What this rank holds.
        instance: Number of the optimizer instance; the first one saves.
        bucket_space: Where the fragments are in checkpoints by bucket.

    Attributes:
        param_state: What goes into the sharded state dict; :meth:`adapt` changes it in place.
    """

    def __init__(self, wanted: Sequence[Wanted], instance: int, bucket_space: BucketSpace) -> None:
        self._wanted = list(wanted)
        self._instance = instance
        self._bucket_space = bucket_space
        self.param_state: dict[str, Any] = {}
        everything = [{kind: kind for kind in _kinds(item)} for item in self._wanted]
        self._ask_by_parameter(everything)
        self._own_keys = self.keys()

    def own_keys(self) -> set[str]:
        """Return the keys, by parameter, of all state that there is."""
        return self._own_keys

    def keys(self) -> set[str]:
        """Return the checkpoint's keys that are asked for now."""
        return keys(self.param_state)

    def adapt(
        self, available: frozenset[str], fresh: Collection[str], momentum_from_adam: bool
    ) -> list[str]:
        """Ask only for what a checkpoint has, as far as the difference is meant.

        State of another optimizer is left alone, and this one's starts fresh. Call it before
        loading; without it a key that is missing makes ``dist_checkpointing.load`` fail.

        Args:
            available: Keys of the checkpoint's tensors and objects.
            fresh: Kinds of state that may be missing; they start fresh.
            momentum_from_adam: Whether Muon's momentum is Adam's first moment where the checkpoint
                has no other.

        Returns:
            What starts fresh or is taken from elsewhere, a line each.

        Raises:
            ConfigurationError: If state is missing, with the parameters and what they lack.
        """
        by_parameter = Index(available, STATE_PREFIX)
        if not self._wanted:
            return []
        sources = Sources(fresh, momentum_from_adam)
        if by_parameter:
            chosen = []
            for item in self._wanted:
                there = by_parameter.kinds(*item.space.keys)
                if item.rest is not None:
                    there |= item.rest.there(available)
                chosen.append(sources.choose(item.space.name, _kinds(item), there))
            sources.check()
            self._ask_by_parameter(chosen)
        else:
            self._ask_by_bucket(available, sources)
        return sources.lines()

    def ask_by_bucket(self) -> None:
        """Ask a checkpoint by bucket for everything, as this optimizer's own wrapper wrote it."""
        tensors = self._tensors()
        everything = {param: {kind: kind for kind in kinds} for param, kinds in tensors.items()}
        self.param_state.clear()
        self.param_state["buckets"] = self._bucket_space.requests(tensors, everything)

    def take(self, loaded: Mapping[str, Any]) -> Iterator[tuple[Wanted, set[str]]]:
        """Write what was loaded to where it belongs, unless it is there already.

        Args:
            loaded: ``param_state`` with values in place of requests.

        Yields:
            What this rank holds, with the kinds of state that were loaded.
        """
        boxes = loaded.get("boxes", {})
        buckets = loaded.get("buckets", {}).get("fragments", {})
        matrices = loaded.get("matrices", {})
        for number, item in enumerate(self._wanted):
            done = set()
            for kind, values in boxes.get(number, {}).items():
                for place, box in enumerate(item.boxes):
                    _copy(box.view(item.tensors[kind]), values[place])
                done.add(kind)
            for kind, value in buckets.get(number, {}).items():
                _copy(item.tensors[kind].detach(), value)
                done.add(kind)
            if item.rest is not None:
                values = matrices.get(number, {})
                item.rest.take(values)
                done |= set(values)
            yield item, done

    def _tensors(self) -> dict[Tensor, Mapping[str, Tensor]]:
        return {item.param: item.tensors for item in self._wanted if item.param is not None}

    def _ask_by_parameter(self, sources: Sequence[Mapping[str, str]]) -> None:
        """Ask for every kind of state, read from the given one, in the parameters' shapes."""
        self.param_state.clear()
        self.param_state["boxes"] = {
            number: {
                kind: {
                    place: box.named(chosen[kind], box.view(values), self._instance)
                    for place, box in enumerate(item.boxes)
                }
                for kind, values in item.tensors.items()
                if kind in chosen
            }
            for number, (item, chosen) in enumerate(zip(self._wanted, sources, strict=True))
        }
        self.param_state["matrices"] = {
            number: {
                kind: item.rest.request(kind, self._instance)
                for kind in item.rest.leaves
                if kind in chosen
            }
            for number, (item, chosen) in enumerate(zip(self._wanted, sources, strict=True))
            if item.rest is not None
        }

    def _ask_by_bucket(self, available: frozenset[str], sources: Sources) -> None:
        prefix = self._bucket_space.prefix(available)
        if prefix is None:
            raise ConfigurationError(
                "checkpoint",
                "no optimizer state of this rank's parameters",
                "must hold optimizer state by parameter, or by bucket (dp_reshardable) of the same "
                "tensor and pipeline parallelism and the same buckets",
                "Load it at the layout that wrote it and save again, write it with "
                "--dist-ckpt-optim-fully-reshardable, or load no optimizer state (--no-load-optim)",
            )
        kinds = self._bucket_space.kinds(available, prefix)
        fragments = self._tensors()
        names = {item.param: item.space.name for item in self._wanted}
        chosen = {
            param: sources.choose(names[param], tensors, kinds[param])
            for param, tensors in fragments.items()
        }
        for item in self._wanted:
            if item.rest is not None:
                sources.choose(item.space.name, _kinds(item), {"another optimizer's"})
        sources.check()
        self.param_state.clear()
        self.param_state["buckets"] = self._bucket_space.requests(fragments, chosen, prefix)


def _kinds(item: Wanted) -> set[str]:
    return set(item.tensors) | (set(item.rest.leaves) if item.rest is not None else set())


def _spellings(key: str) -> tuple[str, str]:
    """Return how a tensor and how an object of this key are named in a checkpoint."""
    return key, f"{key}/shard_0_1"


def _copy(target: Tensor, value: Tensor) -> None:
    if value.data_ptr() != target.data_ptr():
        target.copy_(value.view(target.shape))
