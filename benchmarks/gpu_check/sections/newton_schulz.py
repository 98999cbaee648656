"""Time all back ends and algorithms of Newton-Schulz, and check their results."""

import gc
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu_check.context import Context, Outcome
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.cpu import Device
from megatron_eopt.math import Orthogonalization, backend_names, get_backend, standard_flops
from megatron_eopt.math.algorithm import AlgorithmT, PrecisionT

STEPS = 5
ROW_S = 1.5
"""Seconds of measurement per row, after a first call that may compile and choose kernels."""

LEFT_S = 20
"""A row does not start if the section has fewer seconds left."""

COPIES = 10
"""A row needs free memory for this number of float32 copies of its matrices."""

TOLERANCES: dict[PrecisionT, float] = {"highest": 1e-4, "medium": 5e-2}
"""Largest relative deviation from the reference; bfloat16 has about two digits."""


class Stack(NamedTuple):
    """Matrices of one shape."""

    batch: int
    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.rows} x {self.columns}"


LARGE = (Stack(1, 8192, 28672), Stack(8, 2048, 7168))
SMALL = (Stack(1, 64, 256), Stack(4, 32, 128))


def run(context: Context) -> Outcome:
    """Measure all installed back ends on every stack of matrices."""
    outcome = context.outcome
    rows: list[dict[str, Any]] = []
    outcome.figures = {"rows": rows}
    until = time.monotonic() + context.seconds - LEFT_S
    every = list(forms())
    for stack in SMALL if context.small else LARGE:
        with outcome.noting(str(stack)):
            rows += measured(stack, context.device, until, every)
    outcome.problems += [
        f"{row['backend']} {row['algorithm']} on {row['matrices']}: {row['problem']}"
        for row in rows
        if row.get("problem")
    ]
    timed = [row for row in rows if "tflops" in row]
    if timed:
        best = max(timed, key=lambda row: float(row["tflops"]))
        outcome.headline = (
            f"fastest: {best['backend']} {best['algorithm']} on {best['matrices']}, "
            f"{best['milliseconds']:.3g} ms, {best['tflops']:.4g} TFLOP/s as if standard"
        )
    return outcome


type Form = tuple[str, AlgorithmT, str]
"""A back end, an algorithm, and the reason if the back end is absent."""


def measured(
    stack: Stack, device: Device, until: float, chosen: Sequence[Form]
) -> Iterator[dict[str, Any]]:
    """Yield a row for every form, including absent ones and those without time.

    Args:
        stack: Shape of the matrices.
        device: The device.
        until: Time limit of all rows, as a value of ``time.monotonic``.
        chosen: The forms to measure.
    """
    precision: PrecisionT = "medium" if device == "cuda" else "highest"
    if device == "cuda" and find_spec("transformer_engine") and not dist.is_initialized():
        # its back end needs a process group, here of this GPU alone
        store = torch._C._distributed_c10d.HashStore()
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    x, expected, told = given(stack, precision, device)
    for name, algorithm, absent in chosen:
        row = {"backend": name, "algorithm": algorithm, "matrices": str(stack)}
        if time.monotonic() > until:
            told = "not measured: no time left"
        row |= {"precision": precision, "note": absent or told}
        if not row["note"] and x is not None and expected is not None:
            row |= figures(name, algorithm, precision, x, expected, until)
        print(row, flush=True)
        yield row


def forms() -> Iterator[Form]:
    """Yield the forms of every back end except ``auto``, which chooses one of the others."""
    for name in sorted({*backend_names()} - {"auto"}, key=backend_names().index):
        try:
            other = get_backend(name)
        except (ConfigurationError, ImportError, OSError, RuntimeError) as error:
            yield name, "auto", f"absent: {error}"
        else:
            algorithms = ("standard", "gram") if other is None else other.algorithms
            yield from ((name, algorithm, "") for algorithm in algorithms)


def given(
    stack: Stack, precision: PrecisionT, device: Device
) -> tuple[Tensor | None, Tensor | None, str]:
    """Return matrices, their orthogonal factors, and a note if they do not fit into memory."""
    needed = COPIES * stack.batch * stack.rows * stack.columns * 4
    if device == "cuda" and (free := torch.cuda.mem_get_info()[0]) < needed:
        return None, None, f"not measured: {free / 2**30:.0f} GiB free of {needed / 2**30:.0f}"
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(tuple(stack), device=device, generator=generator)
    if precision == "medium":
        # round first, so that all back ends get the same values
        x = x.to(torch.bfloat16).to(torch.float32)
    # float64 is slow on most GPUs
    reference = x if device == "cuda" else x.double()
    compute = Orthogonalization(steps=STEPS, algorithm="standard", precision="highest")
    return x, compute(reference).to(torch.float32), ""


class _TimeUpError(Exception):
    """A row has no more time."""


@contextmanager
def _ending(until: float) -> Iterator[None]:
    """Raise :class:`_TimeUpError` in the block when ``time.monotonic`` reaches ``until``."""

    def stop(*_: object) -> None:
        raise _TimeUpError

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, max(1e-3, until - time.monotonic()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def figures(
    name: str,
    algorithm: AlgorithmT,
    precision: PrecisionT,
    x: Tensor,
    expected: Tensor,
    until: float,
) -> dict[str, Any]:
    """Return the time of a form and its deviation, or its error."""
    try:
        with _ending(until):
            return _figures(name, algorithm, precision, x, expected)
    except _TimeUpError:
        return {"note": "not measured: its kernels were still compiled when all time was up"}
    except Exception as error:
        # a kernel that does not compile is a result; continue with the other rows
        return {"problem": f"{type(error).__name__}: {error}"[:500], "note": "failed"}
    finally:
        gc.collect()
        if x.is_cuda:
            torch.cuda.empty_cache()


def _figures(
    name: str, algorithm: AlgorithmT, precision: PrecisionT, x: Tensor, expected: Tensor
) -> dict[str, Any]:
    compute = Orthogonalization(steps=STEPS, algorithm=algorithm, precision=precision, backend=name)
    # the optimizer passes matrices in this dtype
    stack = x.to(compute.stack_dtype)
    difference = compute(stack).to(torch.float32).sub_(expected)
    deviation = float(difference.norm() / expected.norm())
    del difference
    times = milliseconds_of(lambda: compute(stack), ROW_S)
    median = statistics.median(times)
    flops = x.shape[0] * standard_flops(x.shape[-2], x.shape[-1], STEPS)
    row: dict[str, Any] = {
        "milliseconds": median,
        "fastest": min(times),
        "slowest": max(times),
        "calls": len(times),
        "tflops": flops / median / 1e9,
        "deviation": deviation,
    }
    # in this form, nan is a problem too
    if not deviation <= TOLERANCES[precision]:
        row["problem"] = f"deviates by {deviation:.1e}, {TOLERANCES[precision]:.0e} are allowed"
    return row


def milliseconds_of(work: Callable[[], object], seconds: float) -> list[float]:
    """Return the times of at least five calls, over about this number of seconds."""
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - began < seconds and len(times) < 50):
        times.append(_milliseconds(work))
    return times


def _milliseconds(work: Callable[[], object]) -> float:
    if not torch.cuda.is_available():
        start = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - start)
    before: Any
    after: Any
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    before.record()
    work()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after))
