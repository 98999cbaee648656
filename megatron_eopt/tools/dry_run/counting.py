"""Counts a step's kernels, bytes, FLOPs, collectives and host reads.

It observes what torch dispatches, so it works for real runs and for dry runs.
"""

import operator
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, register_flop_formula

from megatron_eopt.base.gpu import HostCopy
from megatron_eopt.base.live_bytes import LiveBytes
from megatron_eopt.math.products import flops_of_multiply
from megatron_eopt.optimizers.modes import Schedule
from megatron_eopt.optimizers.update_rule import UpdateRule
from megatron_eopt.tools.dry_run.kernels import copied_addend, moved_by
from megatron_eopt.wrappers.memory import Memory

register_flop_formula(torch.ops.megatron_eopt.multiply, get_raw=True)(flops_of_multiply)

_WITH_OUTPUT = ("gather", "scatter", "alltoall")
"""Name parts of collectives whose first argument is the output and whose second is the input."""

_WAIT_FOR_NOBODY = ("torch.optim", "megatron_eopt.base.gpu")
"""Modules whose reads do not wait, because the value is already in host memory."""

_MACHINERY = (
    "torch",
    "megatron_eopt.base.live_bytes",
    "megatron_eopt.cpu",
    "megatron_eopt.tools.dry_run",
)

_PHASES = {
    "megatron_eopt.wrappers.gradients.clip": "clipping",
    "megatron_eopt.wrappers.gradients.factor": "clipping",
    "megatron_eopt.wrappers.gradients.unscale_": "loss scale",
    "megatron_eopt.wrappers.gradients": "norm",
    "megatron_eopt.layouts": "exchange",
    "megatron_eopt.math.newton_schulz": "orthogonalization",
    "megatron_eopt.math.orthogonalize": "orthogonalization",
    "megatron_eopt.math.norms": "orthogonalization",
    "megatron_eopt.math.products": "orthogonalization",
    "megatron_eopt.math.backends": "orthogonalization",
    "megatron_eopt.optimizers.momentum": "momentum's rounding",
    "megatron_eopt.optimizers.muon_rule._apply": "weights",
    "megatron_eopt.optimizers.muon_rule": "directions",
    "megatron_eopt.optimizers.exchange": "exchange",
    "megatron_eopt.optimizers": "update",
    "torch.optim": "update",
    "megatron_eopt.storage": "copies to the model",
    "megatron_eopt.wrappers.zero1.optimizer": "copies to the model",
    "megatron_eopt.wrappers.replicated": "copies to the model",
    "megatron_eopt.fsdp2.dtensors": "copies to the model",
    "megatron.core.distributed.param_and_grad_buffer": "copies to the model",
    "megatron.core.optimizer.optimizer._copy_main_params_to_model_params": "copies to the model",
    "megatron.core.optimizer.distrib_optimizer._copy_main_params": "copies to the model",
}
"""Phase by the prefix of a function's full name; the innermost matching function decides."""

_SENT = {
    "norm": "gradient norm",
    "exchange": "shared matrices",
    "orthogonalization": "shared matrices",
    "update": "shared matrices",
    "copies to the model": "stepped weights",
}
"""What collectives of a phase are for."""

_COPY: Any = torch.ops.aten.copy_.default

READ: Any = torch.ops.aten._local_scalar_dense.default
"""The operator that copies a value to the host."""


class Collective(NamedTuple):
    """One kind of collective call."""

    name: str  # torch's operator name, without outer underscores
    ranks: int  # number of ranks in the group
    sent: int  # bytes of this rank's input
    first: int  # lowest global rank of the group
    last: int  # highest global rank of the group
    purpose: str = ""  # what it is for


class Phase(NamedTuple):
    """The optimizer (None: all of them) and the part of its step to which work belongs."""

    optimizer: str | None
    name: str


@dataclass(frozen=True)
class Amount:
    """Work of the device."""

    kernels: int = 0  # except matrix products, but with the copies of their addends
    bytes: int = 0  # read and written by these kernels
    flops: int = 0  # of matrix products, by torch's formulas; half for mirrored triangles
    kernels_in_all: int = 0  # including one per matrix product, whose bytes are not counted
    host_waits: int = 0  # how often the host waits for a value

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(*map(operator.add, vars(self).values(), vars(other).values()))


class Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the work done inside its ``with`` block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives: Counter[Collective] = Counter()  # calls; kernels are not counted
        # in the order in which the phases began
        self.phases: defaultdict[Phase, Amount] = defaultdict(Amount)
        self.host_reads: Counter[str] = Counter()  # waits of the host, by the calling function

    @property
    def flops(self) -> int:
        """Floating-point operations of all matrix products."""
        return sum(amount.flops for amount in self.phases.values())

    def add(self, others: "Counts") -> None:
        """Count work again that other counts have seen."""
        self.collectives.update(others.collectives)
        self.host_reads.update(others.host_reads)
        for phase, amount in others.phases.items():
            self.phases[phase] += amount

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func.overloadpacket.__name__, args)
        result = func(*args, **kwargs)
        amount = Amount()
        if func is READ and (reader := who_reads()):
            self.host_reads[reader] += 1
            amount = Amount(host_waits=1)
        elif (formula := flop_registry.get(func.overloadpacket)) is not None:
            kernels, moved = copied_addend(func, args, kwargs, result)
            flops = formula(*args, **kwargs, out_val=result)
            amount = Amount(kernels, moved, flops, kernels_in_all=kernels + 1)
        elif func.namespace in ("aten", "megatron_eopt") and not _is_sent_to_host(func, args):
            kernels, moved = moved_by(func, args, kwargs, result)
            amount = Amount(kernels, moved, kernels_in_all=kernels)
        if amount != Amount():
            self.phases[current_phase()] += amount
        return result

    def _note(self, name: str, args: Any) -> None:
        if name == "barrier" or not (group := next(_groups(args), None)):
            return
        # an output is as large as the inputs of all ranks, and not what this rank sends
        given = args[1] if any(word in name for word in _WITH_OUTPUT) else args[0]
        sent = sum(item.nbytes for item in tree_iter(given) if isinstance(item, Tensor))
        ranks = distributed.get_process_group_ranks(group)
        phase = current_phase().name
        is_moved = phase == "exchange" and "alltoall" in name
        purpose = "matrices to owners and back" if is_moved else _SENT.get(phase, phase)
        call = Collective(name.strip("_"), len(ranks), sent, min(ranks), max(ranks), purpose)
        self.collectives[call] += 1


def _is_sent_to_host(func: Any, args: Any) -> bool:
    """Return whether a :class:`HostCopy` starts, which is no kernel; only on GPUs it copies."""
    if func is not _COPY or not args[1].is_cuda or args[0].is_cuda:
        return False
    return any(
        frame.f_globals.get("__name__") == HostCopy.__module__
        for frame, _ in walk_stack(sys._getframe(2))
    )


def _groups(args: Any) -> Iterator[Any]:
    for item in args:
        if isinstance(item, torch.ScriptObject):
            yield distributed.ProcessGroup.unbox(item)


def current_phase() -> Phase:
    """Return the phase that the current call stack belongs to."""
    name = optimizer = None
    for frame, _ in walk_stack(sys._getframe(2)):
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        name = name or _phase_of(f"{module}.{function}")
        optimizer = _stepped_in(frame) or optimizer
    return Phase(optimizer, name or who_reads() or "?")


def updating_optimizer() -> str | None:
    """Return the optimizer whose step the current call stack belongs to, if it is in one."""
    return next(
        filter(None, (_stepped_in(frame) for frame, _ in walk_stack(sys._getframe(1)))), None
    )


def _stepped_in(frame: FrameType) -> str | None:
    """Return the optimizer whose step function a frame runs."""
    function = frame.f_code.co_name
    # ``WholeMatrixRule.step``, ``MuonRule.compute_ahead`` and the like, up the stack of this call
    if not function.startswith(("step", "compute_ahead")):
        return None
    # f_locals keeps variables alive, so read those of step functions only
    is_ours = "eopt.optimizers." in frame.f_globals.get("__name__", "")
    update_rule = frame.f_locals.get("self") if is_ours else None
    return update_rule.name if isinstance(update_rule, UpdateRule) else None


@cache
def _phase_of(function: str) -> str | None:
    return next((name for start, name in _PHASES.items() if function.startswith(start)), None)


def who_reads() -> str | None:
    """Return the module and function that wait for a value; None if the read does not wait."""
    for frame, _ in walk_stack(sys._getframe(2)):
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_WAIT_FOR_NOBODY):
            return None
        if not module.startswith(_MACHINERY):
            return f"{module}.{frame.f_code.co_name}"
    return "?"


@dataclass(frozen=True)
class Report:
    """What one rank does in a step."""

    elements: dict[str, int]  # number of weights that each optimizer updates on this rank
    schedules: list[tuple[str, Schedule]]  # which rank computes which matrices, by optimizer
    collectives: Counter[Collective]  # number of calls
    phases: dict[Phase, Amount]  # in the order in which they begin
    host_reads: Counter[str]  # waits of the host for the device, by the calling function
    memory: Memory  # bytes of this rank

    @property
    def total(self) -> Amount:
        """The device's work in all phases."""
        return sum(self.phases.values(), Amount())

    @property
    def bytes_per_element(self) -> dict[str, float]:
        """Bytes moved outside matrix products per weight, by optimizer, with shared work."""
        moved: Counter[str | None] = Counter()
        for phase, amount in self.phases.items():
            moved[phase.optimizer] += amount.bytes
        each = moved[None] / max(sum(self.elements.values()), 1)
        return {name: each + moved[name] / count for name, count in self.elements.items() if count}


def schedules_of(optimizer: Any) -> list[tuple[str, Schedule]]:
    """Return which rank computes which matrices, each with its optimizer's name."""
    return [
        (update_rule.name, schedule)
        for storage in optimizer.chained_optimizers
        for update_rule in storage.update_rules
        for schedule in update_rule.schedules
    ]


def report_of(optimizer: Any, give_gradients: Callable[[], None]) -> Report:
    """Run two optimizer steps and report on the second, when state and buffers exist; collective.

    Args:
        optimizer: The result of ``get_megatron_optimizer``.
        give_gradients: Sets the gradients; called before each step.
    """
    give_gradients()
    optimizer.step()
    give_gradients()
    with Counts() as counts, LiveBytes() as live:
        optimizer.step()
    elements: Counter[str] = Counter()
    for storage in optimizer.chained_optimizers:
        for update_rule in storage.update_rules:
            elements[update_rule.name] += sum(main.numel() for main in update_rule.params)
    return Report(
        elements=dict(elements),
        schedules=schedules_of(optimizer),
        collectives=counts.collectives,
        phases=dict(counts.phases),
        host_reads=counts.host_reads,
        memory=replace(optimizer.memory(), transient=live.peak),
    )
