"""Counts what a step does: collectives with bytes, floating-point operations, host's readings.

It sees what torch dispatches, so that it counts real runs and dry runs alike.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from megatron_eopt.base.live_bytes import LiveBytes
from megatron_eopt.build.memory import Memory
from megatron_eopt.optimizers.modes import Schedule

_WITH_OUTPUT = ("gather", "scatter", "alltoall")
"""In the names of collectives that have what arrives first, and then what is handed over."""

_WAIT_FOR_NOBODY = ("torch.optim", "megatron_eopt.base.host_copy")
"""Modules that read what lies in the host's memory, or came there long ago."""

_MACHINERY = (
    "torch",
    "megatron_eopt.base.live_bytes",
    "megatron_eopt.cpu",
    "megatron_eopt.dry_run",
)

READ: Any = torch.ops.aten._local_scalar_dense.default
"""What brings a value to the host."""


class Collective(NamedTuple):
    """One kind of call.

    Attributes:
        name: As torch's dispatcher has it, without underscores at its ends.
        ranks: Of its group.
        sent: Bytes that this rank hands over.
    """

    name: str
    ranks: int
    sent: int


class Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered.

    Attributes:
        collectives: How often each was called.
        flops: Floating-point operations of matrix products, by torch's formulas.
        host_reads: How often the host waited for a value of the device, by who asked for it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives: Counter[Collective] = Counter()
        self.flops = 0
        self.host_reads: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func.overloadpacket.__name__, args)
        if func is READ and (place := who_reads()):
            self.host_reads[place] += 1
        result = func(*args, **kwargs)
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result

    def _note(self, name: str, args: Any) -> None:
        if name == "barrier" or not (group := next(_groups(args), None)):
            return
        given = args[1] if any(word in name for word in _WITH_OUTPUT) else args[0]
        sent = sum(item.nbytes for item in tree_iter(given) if isinstance(item, Tensor))
        self.collectives[Collective(name.strip("_"), group.size(), sent)] += 1


def _groups(args: Any) -> Iterator[Any]:
    for item in args:
        if isinstance(item, torch.ScriptObject):
            yield distributed.ProcessGroup.unbox(item)


def who_reads() -> str | None:
    """Return module and function that wait for a value; None if it is the host's own."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_WAIT_FOR_NOBODY):
            return None
        if not module.startswith(_MACHINERY):
            return f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


@dataclass(frozen=True)
class Report:
    """One rank's step.

    Attributes:
        elements: How many weights each optimizer steps on this rank.
        schedules: Who computes which matrices, by optimizer.
        collectives: How often each is called.
        flops: Floating-point operations of matrix products.
        host_reads: How often the host waits for a value of the device, by who asks.
        memory: What this rank holds.
    """

    elements: dict[str, int]
    schedules: list[tuple[str, Schedule]]
    collectives: Counter[Collective]
    flops: int
    host_reads: Counter[str]
    memory: Memory


def schedules_of(optimizer: Any) -> list[tuple[str, Schedule]]:
    """Return who computes which matrices, with the name of the optimizer that steps them."""
    return [
        (driver.name, schedule)
        for stepper in optimizer.steppers
        for driver in stepper.drivers
        for schedule in driver.schedules
    ]


def report_of(optimizer: Any, give_gradients: Callable[[], None]) -> Report:
    """Let an optimizer step twice, and report what the second step does.

    State and buffers exist from the first step on. All ranks call this together.

    Args:
        optimizer: What ``get_megatron_optimizer`` returned.
        give_gradients: Sets gradients, before either step.
    """
    give_gradients()
    optimizer.step()
    give_gradients()
    with Counts() as counts, LiveBytes() as live:
        optimizer.step()
    elements: Counter[str] = Counter()
    for stepper in optimizer.steppers:
        for driver, _, main in stepper.stepped():
            elements[driver.name] += main.numel()
    return Report(
        elements=dict(elements),
        schedules=schedules_of(optimizer),
        collectives=counts.collectives,
        flops=counts.flops,
        host_reads=counts.host_reads,
        memory=replace(optimizer.memory(), transient=live.peak),
    )
