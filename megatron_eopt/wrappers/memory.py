"""Count the memory of one rank by use."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_eopt.base.address import address_of
from megatron_eopt.base.nested_state import leaves
from megatron_eopt.megatron_core.stored_weights import StoredWeights, rules_of
from megatron_eopt.storage.local_tensors import local_of


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    weights: int  # model parameters, with DDP's parameter buffers
    gradients: int  # tensors in which gradients are accumulated
    main_weights: int  # main weights on the device, unless they are the model's
    state: int  # optimizer state on the device
    buffers: int  # buffers to send and compute matrices, kept between steps
    host: int  # main weights and state off-loaded to host memory
    # peak of a step above all of this, if one was measured
    transient: int | None = None

    @property
    def kept(self) -> int:
        """Bytes on the device of weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.main_weights + self.state

    @property
    def total(self) -> int:
        """Bytes on the device at the peak of a step."""
        return sum(size or 0 for size in vars(self).values()) - self.host


def memory_of(storages: Sequence[StoredWeights], model_chunks: Sequence[Any]) -> Memory:
    """Count the bytes of a chain's tensors; shared memory counts in the first category only."""
    params = [param for chunk in model_chunks for param in chunk.parameters()]
    gradients = (getattr(param, "main_grad", None) for param in params)
    mains = (shard.main for storage in storages for shard in storage.shards)
    update_rules = list(rules_of(storages))
    seen: set[int] = set()
    return Memory(
        weights=_bytes(params, seen),
        gradients=_bytes((grad for grad in gradients if grad is not None), seen),
        # before the device, so that off-loaded tensors count here
        host=_bytes(_on_host(storages), seen),
        main_weights=_bytes(mains, seen),
        state=_bytes(_states(storages), seen),
        buffers=_bytes(
            (value for update_rule in update_rules for value in update_rule.buffers()), seen
        ),
    )


def _on_host(storages: Sequence[StoredWeights]) -> Iterator[Tensor]:
    for storage in storages:
        for update_rule in storage.update_rules:
            if update_rule.host is not None:
                yield from update_rule.host.tensors(storage.optimizer.state)


def _states(storages: Sequence[StoredWeights]) -> Iterator[Tensor]:
    for storage in storages:
        if not storage.is_stub_optimizer:
            values = (value for _, value in leaves(list(storage.optimizer.state.values())))
            yield from (value for value in values if isinstance(value, Tensor))


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        local = local_of(tensor)
        # whole storages are counted: a parameter is a view of DDP's buffer, which counts once
        place = address_of(local)[0]
        if place not in seen:
            seen.add(place)
            total += local.untyped_storage().nbytes()
    return total
