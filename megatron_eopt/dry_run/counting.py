"""Counts what a step does: kernels and bytes by phase, collectives, operations, host's readings.

It sees what torch dispatches, so that it counts real runs and dry runs alike.
"""

import operator
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from traceback import walk_stack
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from megatron_eopt.base.live_bytes import LiveBytes
from megatron_eopt.build.memory import Memory
from megatron_eopt.dry_run.kernels import moved_by
from megatron_eopt.optimizers.driver import Driver
from megatron_eopt.optimizers.modes import Schedule

_WITH_OUTPUT = ("gather", "scatter", "alltoall")
"""In the names of collectives that have what arrives first, and then what is handed over."""

_WAIT_FOR_NOBODY = ("torch.optim", "megatron_eopt.base.gpu")
"""Modules that read what lies in the host's memory, or came there long ago."""

_MACHINERY = (
    "torch",
    "megatron_eopt.base.live_bytes",
    "megatron_eopt.cpu",
    "megatron_eopt.dry_run",
)

_PHASES = {
    "megatron_eopt.build.gradients.clip": "clipping",
    "megatron_eopt.build.gradients.factor": "clipping",
    "megatron_eopt.build.gradients.unscale_": "loss scale",
    "megatron_eopt.build.gradients": "norm",
    "megatron_eopt.layouts": "exchange",
    "megatron_eopt.math.newton_schulz": "orthogonalization",
    "megatron_eopt.math.orthogonalize": "orthogonalization",
    "megatron_eopt.math.norms": "orthogonalization",
    "megatron_eopt.math.backends": "orthogonalization",
    "megatron_eopt.optimizers.momentum": "momentum's rounding",
    "megatron_eopt.optimizers.muon_driver._apply": "weights",
    "megatron_eopt.optimizers.muon_driver": "directions",
    "megatron_eopt.optimizers.windows": "directions",
    "megatron_eopt.optimizers.engine": "exchange",
    "megatron_eopt.optimizers": "update",
    "torch.optim": "update",
    "megatron_eopt.storage": "copies to the model",
}
"""By the first function, from the one that calls torch outwards, whose name begins so."""

READ: Any = torch.ops.aten._local_scalar_dense.default
"""What brings a value to the host."""


class Collective(NamedTuple):
    """One kind of call."""

    name: str  # as torch's dispatcher has it, without underscores at its ends
    ranks: int  # of its group
    sent: int  # bytes that this rank hands over
    first: int  # lowest global rank of its group
    last: int  # highest one


class Phase(NamedTuple):
    """Whose step something belongs to, None if it is done for all optimizers, and what it is."""

    optimizer: str | None
    name: str


@dataclass(frozen=True)
class Amount:
    """What the device does."""

    kernels: int = 0  # outside of matrix products
    bytes: int = 0  # that these read and write
    flops: int = 0  # of matrix products, by torch's formulas
    kernels_in_all: int = 0  # with one for each product, whose bytes are counted nowhere
    host_waits: int = 0  # how often the host waits for a value

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(*map(operator.add, vars(self).values(), vars(other).values()))


class Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # how often each was called; their kernels are counted nowhere
        self.collectives: Counter[Collective] = Counter()
        # what was done in each phase, in the order in which they began
        self.phases: defaultdict[Phase, Amount] = defaultdict(Amount)
        self.host_reads: Counter[str] = Counter()  # how often the host waited, by who asked

    @property
    def flops(self) -> int:
        """Floating-point operations of all matrix products."""
        return sum(amount.flops for amount in self.phases.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func.overloadpacket.__name__, args)
        result = func(*args, **kwargs)
        amount = Amount()
        if func is READ and (place := who_reads()):
            self.host_reads[place] += 1
            amount = Amount(host_waits=1)
        elif (formula := flop_registry.get(func.overloadpacket)) is not None:
            amount = Amount(flops=formula(*args, **kwargs, out_val=result), kernels_in_all=1)
        elif func.namespace in ("aten", "megatron_eopt"):
            kernels, moved = moved_by(func, args, kwargs, result)
            amount = Amount(kernels, moved, kernels_in_all=kernels)
        if amount != Amount():
            self.phases[_phase()] += amount
        return result

    def _note(self, name: str, args: Any) -> None:
        if name == "barrier" or not (group := next(_groups(args), None)):
            return
        given = args[1] if any(word in name for word in _WITH_OUTPUT) else args[0]
        sent = sum(item.nbytes for item in tree_iter(given) if isinstance(item, Tensor))
        ranks = distributed.get_process_group_ranks(group)
        call = Collective(name.strip("_"), len(ranks), sent, min(ranks), max(ranks))
        self.collectives[call] += 1


def _groups(args: Any) -> Iterator[Any]:
    for item in args:
        if isinstance(item, torch.ScriptObject):
            yield distributed.ProcessGroup.unbox(item)


def _phase() -> Phase:
    """Return who asks for what is done."""
    name = optimizer = None
    for frame, _ in walk_stack(sys._getframe(2)):
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        name = name or _phase_of(f"{module}.{function}")
        # to look at variables keeps them alive, so those of no other function are looked at
        steps = function.startswith(("step", "look_ahead")) and "eopt.optimizers." in module
        if steps and isinstance(driver := frame.f_locals.get("self"), Driver):
            optimizer = driver.name
    return Phase(optimizer, name or who_reads() or "?")


@cache
def _phase_of(function: str) -> str | None:
    return next((name for start, name in _PHASES.items() if function.startswith(start)), None)


def who_reads() -> str | None:
    """Return module and function that wait for a value; None if it is the host's own."""
    for frame, _ in walk_stack(sys._getframe(2)):
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_WAIT_FOR_NOBODY):
            return None
        if not module.startswith(_MACHINERY):
            return f"{module}.{frame.f_code.co_name}"
    return "?"


@dataclass(frozen=True)
class Report:
    """One rank's step."""

    elements: dict[str, int]  # how many weights each optimizer steps on this rank
    schedules: list[tuple[str, Schedule]]  # who computes which matrices, by optimizer
    collectives: Counter[Collective]  # how often each is called
    # what the device does in each phase, in the order in which they begin
    phases: dict[Phase, Amount]
    host_reads: Counter[str]  # how often the host waits for a value of the device, by who asks
    memory: Memory  # what this rank holds

    @property
    def total(self) -> Amount:
        """What the device does in all."""
        return sum(self.phases.values(), Amount())

    @property
    def bytes_per_element(self) -> dict[str, float]:
        """Bytes outside of products for each weight of an optimizer, what all share included."""
        moved: Counter[str | None] = Counter()
        for phase, amount in self.phases.items():
            moved[phase.optimizer] += amount.bytes
        each = moved[None] / max(sum(self.elements.values()), 1)
        return {name: each + moved[name] / count for name, count in self.elements.items() if count}


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
        phases=dict(counts.phases),
        host_reads=counts.host_reads,
        memory=replace(optimizer.memory(), transient=live.peak),
    )
