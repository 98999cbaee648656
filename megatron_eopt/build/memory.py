"""What one rank's memory is used for: counted tensors, and the peak of a step that was watched."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from megatron_eopt.base.address import address_of
from megatron_eopt.optimizers.member import Member
from megatron_eopt.optimizers.nested_state import leaves
from megatron_eopt.stores.dtensors import local_of

_MIB = 2**20


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        weights: Of the model's parameters, with the buffers that they lie in.
        gradients: Of what gradients are accumulated in.
        main_weights: Of what is stepped, where it is not the model's, on the device.
        state: Of the optimizers' state on the device.
        buffers: Of what the optimizers keep to move and to compute matrices.
        host: Of main weights and state that are off-loaded to the host's memory.
        transient: The most by which a whole step exceeds all of this; None until one was watched.
    """

    weights: int
    gradients: int
    main_weights: int
    state: int
    buffers: int
    host: int
    transient: int | None = None

    def __str__(self) -> str:
        """Return one line in MiB."""
        found = [(field.name, getattr(self, field.name)) for field in fields(self)]
        shown = [f"{name} {size / _MIB:.1f}" for name, size in found if size is not None]
        return f"MiB of a rank: {', '.join(shown)}"


def memory_of(
    members: Sequence[Member], model_chunks: Sequence[Any], transient: int | None
) -> Memory:
    """Count what a chain's tensors take; every byte once, where it belongs first."""
    params = [param for chunk in model_chunks for param in chunk.parameters()]
    gradients = (getattr(param, "main_grad", None) for param in params)
    mains = (item.main for member in members for item in member.storage.stored())
    drivers = [driver for member in members for driver in member.drivers]
    seen: set[int] = set()
    return Memory(
        weights=_bytes(params, seen),
        gradients=_bytes((grad for grad in gradients if grad is not None), seen),
        # what is off-loaded comes before what is not
        host=_bytes(_on_host(members), seen),
        main_weights=_bytes(mains, seen),
        state=_bytes(_states(members), seen),
        buffers=_bytes((value for driver in drivers for value in driver.buffers()), seen),
        transient=transient,
    )


def _on_host(members: Sequence[Member]) -> Iterator[Tensor]:
    for member in members:
        for driver in member.drivers:
            if driver.host is not None:
                yield from driver.host.tensors(member.storage.optimizer.state)


def _states(members: Sequence[Member]) -> Iterator[Tensor]:
    for member in members:
        if not member.storage.is_stub_optimizer:
            found = (value for _, value in leaves(list(member.storage.optimizer.state.values())))
            yield from (value for value in found if isinstance(value, Tensor))


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        local = local_of(tensor)
        place = address_of(local)[0]
        if place not in seen:
            seen.add(place)
            total += local.untyped_storage().nbytes()
    return total
