"""Decides which of our GPU kernels run: those that have computed what torch computes.

Note [Self-check]
    Kernels that replace one another are a :class:`Family`. Before a family is used on a device, all
    its kernels run once on small numbers there. If one raises an error or differs from torch's
    functions, these take the place of the whole family, after a warning. When an optimizer is
    built, ranks agree on the families that work on all of them (:func:`agree`), since other
    kernels round otherwise and send other dtypes.

    Where torch's functions would fail as well, the check raises an error, which all ranks raise:
    without memory, also after unused memory was freed; on a GPU that a kernel has broken; and if
    the check takes longer than :data:`LIMIT`.

    Numbers are small integers, so that most results are exact. They stand amid nan and other
    numbers (:func:`integers`): what is read or written outside of a tensor shows.
"""

import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from megatron_eopt.base import gpu, peers
from megatron_eopt.base.agreement import gather_objects, is_rank_0, raise_together
from megatron_eopt.base.errors import check_choice
from megatron_eopt.base.log import warn

logger = logging.getLogger(__name__)

SWITCH = "MEGATRON_EOPT_KERNELS"
"""Environment variable; with 0, torch's functions compute everything."""

LIMIT = 300.0
"""Seconds that the check of a family may take; compiling takes most of about 10."""

_OFF = f"{SWITCH}=0 turns all of them off"
_NOT_MEANT = ""  # in place of a fault: kernels are not meant for a device, so nobody is warned

FAMILIES: dict[str, "Family"] = {}
"""All kernels, by the name of their family."""


class KernelError(RuntimeError):
    """A kernel has raised an error, broken the GPU or hung; the text names the switch."""


class Case(NamedTuple):
    """One run of kernels on small numbers."""

    name: str
    compute: Callable[[], tuple[Sequence[Tensor], Sequence[Tensor]]]  # results, and torch's
    tolerance: float = 0.0  # largest deviation, relative to the largest number of a tensor


class Family:
    """Kernels that are used together; see Note [Self-check].

    Args:
        name: What warnings and errors call them.
        is_meant_for: Whether a device has what they need, such as another package.
    """

    def __init__(
        self, name: str, is_meant_for: Callable[[torch.device], bool] = lambda _: True
    ) -> None:
        self.name = name
        self._is_meant_for = is_meant_for
        self._cases: Callable[[torch.device], Iterator[Case]] | None = None
        self._faults: dict[torch.device, str | None] = {}
        self._excluded: set[torch.device] = set()  # where another rank cannot use them
        FAMILIES[name] = self

    def checked_by[F: Callable[[torch.device], Iterator[Case]]](self, cases: F) -> F:
        """Register the function that yields the cases of a device; a decorator."""
        self._cases = cases
        return cases

    def runs(self, tensor: Tensor) -> bool:
        """Return whether the kernels handle a tensor: on a GPU, or a dry run's fake one."""
        # a fake tensor may claim to be on a GPU that this machine lacks
        if is_fake(tensor):
            return is_on()
        return tensor.is_cuda and self.work_on(tensor.device)

    def work_on(self, device: torch.device) -> bool:
        """Return whether the kernels are on and give right results on a GPU."""
        return is_on() and device not in self._excluded and self.fault(device) is None

    def fault(self, device: torch.device, *, warns: bool = True) -> str | None:
        """Return what is wrong with the kernels on a device, None if nothing is; checked once.

        Raises:
            KernelError: If a kernel has broken the GPU, or does not end.
            RuntimeError: If there is no memory for the check.
        """
        if device not in self._faults:
            # what the check itself calls may ask, too
            self._faults[device] = None
            try:
                fault = self._first_fault(device) if self._is_meant_for(device) else _NOT_MEANT
            except BaseException:  # Ctrl-C, no memory: the check has not been done
                del self._faults[device]
                raise
            self._faults[device] = fault
            if fault and warns:
                self.warn(fault)
        return self._faults[device]

    def exclude(self, device: torch.device, excluded: bool) -> None:
        """Say whether another rank cannot use them, so that this one does not either."""
        (self._excluded.add if excluded else self._excluded.discard)(device)

    def warn(self, fault: str) -> None:
        """Log that torch's functions are used."""
        logger.warning(
            "the GPU kernels for %s do not work here, so torch's functions are used instead: "
            "results stay right, steps are slower. What failed: %s. %s=0 turns all kernels off.",
            self.name,
            fault,
            SWITCH,
        )

    def forget(self) -> None:
        """Check the kernels anew at their next use."""
        self._faults.clear()
        self._excluded.clear()

    @contextmanager
    def launching(self, tensor: Tensor) -> Iterator[None]:
        """Launch these kernels in a block, on the device of ``tensor``.

        Triton launches on the current device, which need not be the tensor's.

        Raises:
            KernelError: If a kernel cannot be built or launched.
        """
        try:
            with torch.cuda.device_of(tensor):  # type: ignore[no-untyped-call]
                yield
        except Exception as error:
            if gpu.lacks_memory(error):
                raise
            failed = KernelError(
                f"a GPU kernel for {self.name} failed: {_text(error)}. Set the environment "
                f"variable {SWITCH}=0, or optimizer_kernels=False, to use torch's functions instead"
            )
            # the others would wait for this rank in vain; a check's errors are agreed on
            if threading.current_thread() not in _CHECKS:
                peers.tell(failed)
            raise failed from error

    def call(self, tensor: Tensor, module: str, function: str, *args: Any, **kwargs: Any) -> None:
        """Call a function that launches these kernels, as in :meth:`launching`.

        Its module is imported now, because what it imports is installed only on machines with GPUs.
        """
        with self.launching(tensor):
            getattr(import_module(module), function)(*args, **kwargs)

    def _first_fault(self, device: torch.device) -> str | None:
        if is_rank_0():
            text = "checking the GPU kernels for %s, which compiles them: at most %d s"
            logger.info(text, self.name, LIMIT)
        try:
            return self._compared(device)
        except Exception as error:
            if not gpu.lacks_memory(error):
                raise
        # outside of the handler, whose error would keep what the check has allocated
        torch.cuda.empty_cache()
        return self._compared(device)

    def _compared(self, device: torch.device) -> str | None:
        """Return the first case that fails, within the time that it may take."""
        names = ["their check"]  # of the cases so far
        try:
            differs = gpu.within(LIMIT, partial(self._differs, device, names), device)
            return f"{names[-1]} differs from torch" if differs else None
        except TimeoutError as error:
            raise self._stopped(f"hangs, or compiles for more than {LIMIT:.0f} s", names) from error
        except Exception as error:
            if gpu.lacks_memory(error):
                raise
            cause = error.__cause__ or error
            if isinstance(cause, torch.AcceleratorError) or gpu.is_broken(device):
                told = f"broke the GPU's context: {_text(cause)}"
                raise self._stopped(told, names) from error
            return f"{names[-1]} raised {_text(cause)}"

    def _differs(self, device: torch.device, names: list[str]) -> bool:
        assert self._cases is not None, f"nothing checks the kernels for {self.name}"
        _CHECKS.add(threading.current_thread())
        with torch.no_grad():
            for name, compute, tolerance in self._cases(device):
                names.append(name)
                for found, wanted in zip(*compute(), strict=True):
                    if not _is_near(found, wanted, tolerance):
                        return True
        return False

    def _stopped(self, what: str, names: list[str]) -> KernelError:
        return KernelError(
            f"a GPU kernel for {self.name} {what}. It was checked with {names[-1]}. This process "
            f"cannot use the GPU any more: start it again with the environment variable {SWITCH}=0"
        )


_CHECKS: WeakSet[threading.Thread] = WeakSet()
"""Threads that check kernels, or have done so."""

_wanted = True  # by the optimizer that was built last
_OF_SWITCH = dict.fromkeys(("1", "true", "on", "yes"), True)
_OF_SWITCH |= dict.fromkeys(("0", "false", "off", "no"), False)


def is_on() -> bool:
    """Return whether kernels are used at all.

    Raises:
        ConfigurationError: If the environment variable has another value than 0 and 1.
    """
    return _wanted and _switch()


def _switch() -> bool:
    # read at each launch, so without a list of choices where nothing is wrong
    text = os.environ.get(SWITCH, "").strip().lower() or "1"
    if text not in _OF_SWITCH:
        check_choice(SWITCH, text, _OF_SWITCH)
    return _OF_SWITCH[text]


def agree(*, wanted: bool) -> None:
    """Let all ranks run the same kernels from now on; collective over the world.

    A family that does not work on one rank is not used by any. ``wanted`` is the setting of the
    optimizer that is being built.

    Raises:
        ConfigurationError: On all ranks, if one has another value of the switch than 0 and 1.
        RuntimeError: On all ranks, if a check has raised an error on one.
    """
    global _wanted
    raise_together(_switch)
    if wanted != _wanted:
        text = "optimizer_kernels=%s now holds for all optimizers of this process"
        warn(logger, text, wanted)
    _wanted = wanted
    probe = torch.empty(0, device="cuda") if gpu.is_there() else None
    mine: dict[str, str | None] = {}
    # a dry run has nothing to check
    if probe is not None and not is_fake(probe):
        mine = peers.succeed_together(partial(_faults_on, probe.device), 2 * LIMIT)
    of_ranks = gather_objects(mine)
    for name in mine if is_on() else ():
        found = {rank: its.get(name) for rank, its in enumerate(of_ranks)}
        faults = {rank: fault for rank, fault in found.items() if fault is not None}
        assert probe is not None
        FAMILIES[name].exclude(probe.device, bool(faults))
        told = next((f"rank {rank}: {fault}" for rank, fault in faults.items() if fault), None)
        if told and is_rank_0():
            FAMILIES[name].warn(told)


def _faults_on(device: torch.device) -> dict[str, str | None]:
    every = FAMILIES.items()
    return {name: it.fault(device, warns=False) if is_on() else _OFF for name, it in every}


def integers(
    seed: int,
    *shape: int,
    dtype: torch.dtype,
    device: torch.device,
    around: float = math.nan,
    shift: int = 0,
) -> Tensor:
    """Return integers from -3 to 3 within a larger piece of memory that has ``around`` elsewhere.

    They begin ``shift`` elements after an aligned address.
    """
    size = math.prod(shape)
    memory = torch.full((2 * _MARGIN + size + shift,), around, dtype=dtype, device=device)
    count = torch.arange(size, device=device) + 7919 * seed
    # hashed, so that neither rows nor columns repeat
    numbers = (count * 2654435761 % 2**32 // 2**16) * 40503 // 2**8 % 7 - 3
    place = memory[_MARGIN + shift :][:size].view(shape)
    return place.copy_(numbers.view(shape))


_MARGIN = 1 << 15  # more than one program of any kernel handles


def whole(tensor: Tensor) -> Tensor:
    """Return all memory that a tensor of :func:`integers` is part of."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def _is_near(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    found, wanted = found.double(), wanted.double()
    off = (found - wanted).nan_to_num().abs().amax()
    most = tolerance * wanted.nan_to_num().abs().amax()
    return torch.equal(found.isnan(), wanted.isnan()) and bool(off <= most)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
