"""Iterations of other packages, by name, in place of our own.

A back end is a function on *wide* matrices (see :mod:`megatron_eopt.math.newton_schulz`). The names
``emerging_optimizers``, ``syrk``, ``transformer_engine`` and ``gram_newton_schulz`` are known;
others can be registered. Asking for one whose package is absent, or for something that it cannot
do, is an error, never a fall-back. ``auto`` is what serves the machine, see :func:`automatic`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from emerging_optimizers.utils import fp32_matmul_precision
from torch import Tensor

from megatron_eopt.base import gpu
from megatron_eopt.base.agreement import is_rank_0
from megatron_eopt.base.errors import ConfigurationError, check_choice
from megatron_eopt.base.upstream import found, needed
from megatron_eopt.math.algorithm import AlgorithmT, Plan
from megatron_eopt.math.coefficients import Triple
from megatron_eopt.math.newton_schulz import normalize

logger = logging.getLogger(__name__)

type ComputeT = Callable[[Tensor, tuple[Triple, ...], Plan, float], Tensor]
"""Orthogonalizes whole matrices, called as ``(wide, schedule, plan, eps)``.

``wide`` is ``(m, n)`` or ``(batch, m, n)`` with ``m <= n``, of any strides, not normalised and not
to be modified; the schedule has one coefficient triple per step; the plan says the algorithm, its
restarts and the operands' dtype; ``eps`` is the smallest norm to divide by. Returns a new tensor
shaped like ``wide``, of any float dtype.
"""


@dataclass(frozen=True)
class Backend:
    """Another iteration."""

    compute: ComputeT  # does the work
    # what it can be asked for; the first is what ``auto`` means to it
    algorithms: tuple[AlgorithmT, ...] = ("standard",)
    half: bool = False  # whether it computes in 16 bits only


def _require(name: str, package: str, install: str, present: bool) -> None:
    """Raise a ConfigurationError unless the package is present, and a GPU."""
    if not present:
        rule = f"needs the package {package}"
        raise ConfigurationError("backend", name, rule, f"Install it: pip install {install}")
    if not gpu.is_there():
        rule = "needs an NVIDIA GPU and none is visible"
        raise ConfigurationError("backend", name, rule, "Use backend='torch'")


def _one_by_one(compute: Callable[[Tensor], Tensor], matrices: Tensor) -> Tensor:
    if matrices.ndim == 2:
        return compute(matrices)
    return torch.stack([compute(matrix) for matrix in matrices])


def _emerging_optimizers() -> Backend:
    """Return emerging-optimizers' own iteration: bit for bit what Megatron gets.

    In 16 bits two ways to round drift apart within a few training steps, however exact both are.
    """

    def compute(wide: Tensor, schedule: tuple[Triple, ...], plan: Plan, eps: float) -> Tensor:
        iterate = partial(
            needed("newton_schulz"),
            steps=len(schedule),
            coefficient_type="custom",
            custom_coefficient_sets=list(schedule),
            eps=eps,
            transpose=False,
        )
        coarse = plan.dtype == torch.bfloat16
        with fp32_matmul_precision("medium" if coarse else torch.get_float32_matmul_precision()):
            return _one_by_one(lambda matrix: iterate(matrix.to(torch.float32)), wide)

    return Backend(compute)


def _syrk() -> Backend:
    """Return the standard iteration on Triton kernels that compute half of symmetric products."""
    # with tensor descriptors
    _require("syrk", "triton >= 3.4", "'triton>=3.4'", bool(found("HAS_TRITON_340")))
    step = needed("newton_schulz_step_tsyrk")

    def compute(wide: Tensor, schedule: tuple[Triple, ...], plan: Plan, eps: float) -> Tensor:
        def iterate(x: Tensor) -> Tensor:
            for a, b, c in schedule:
                x = step(x, a, b, c)
            return x

        return _one_by_one(iterate, normalize(wide, eps, plan.dtype))

    return Backend(compute, half=True)


def _gram_newton_schulz() -> Backend:
    """Return the package's kernels, in float16 with our restarts; it normalises by itself."""
    present = find_spec("gram_newton_schulz") is not None
    _require("gram_newton_schulz", "gram_newton_schulz", "gram-newton-schulz", present)

    @cache
    def solver(schedule: tuple[Triple, ...], plan: Plan, eps: float) -> Any:
        return import_module("gram_newton_schulz").GramNewtonSchulz(
            ns_epsilon=eps,
            ns_coefficients=[list(triple) for triple in schedule],
            use_gram_newton_schulz=plan.algorithm == "gram",
            gram_newton_schulz_reset_iterations=list(plan.restarts),
        )

    def compute(wide: Tensor, schedule: tuple[Triple, ...], plan: Plan, eps: float) -> Tensor:
        # the package's graphs reuse their output buffer, hence the copy
        result: Tensor = solver(schedule, plan, eps)(wide.contiguous()).clone()
        return result

    return Backend(compute, ("gram", "standard"), half=True)


def transformer_engine(group: dist.ProcessGroup | None = None) -> Backend:
    """Return Transformer Engine's ``newton_schulz``: cuSolverMp over an NCCL process group.

    Args:
        group: The ranks among which the library spreads a matrix; every one of them makes the same
            calls with the same whole matrices. Default: all ranks.

    Raises:
        ConfigurationError: If Transformer Engine, a GPU or ``torch.distributed`` is absent.
    """
    name, present = "transformer_engine", find_spec("transformer_engine") is not None
    _require(name, name, "--no-build-isolation 'transformer-engine[pytorch]'", present)
    if not dist.is_initialized():
        way_out = "Call torch.distributed.init_process_group('nccl') first, also for one GPU"
        raise ConfigurationError("backend", name, "needs an NCCL process group", way_out)
    module = import_module("transformer_engine.pytorch.newton_schulz")
    context = module.CusolverMpCtx(group or dist.group.WORLD)

    def compute(wide: Tensor, schedule: tuple[Triple, ...], plan: Plan, eps: float) -> Tensor:
        x = normalize(wide, eps, plan.dtype)
        for one in [x] if x.ndim == 2 else x.unbind(0):
            module.newton_schulz_tp(one, context, len(schedule), list(schedule))
        return x

    return Backend(compute)


_LOADERS: dict[str, Callable[[], Backend]] = {
    "emerging_optimizers": _emerging_optimizers,
    "syrk": _syrk,
    "transformer_engine": transformer_engine,
    "gram_newton_schulz": _gram_newton_schulz,
}
_LOADED: dict[str, Backend] = {}


_SERVED = (9, 10)
"""Major compute capabilities that gram-newton-schulz has symmetric kernels for."""


@cache
def automatic() -> str:
    """Return the back end that ``auto`` means on this machine, and log why on rank 0.

    Measured on an H100, gram-newton-schulz is the fastest. ``syrk`` is faster than torch, too, but
    first tries hundreds of kernels for each size, which takes minutes: it has to be asked for.
    """
    package = "gram_newton_schulz"
    missing = [name for name in (package, "quack") if find_spec(name) is None]
    name = "torch"
    if not gpu.is_there():
        why = "no NVIDIA GPU is visible"
    elif missing:
        why = f"{missing[0]} is not installed"
    elif (capability := torch.cuda.get_device_capability())[0] not in _SERVED:
        why = f"{package} has no kernels for compute capability {capability[0]}.{capability[1]}"
    else:
        name, why = package, "its kernels serve this GPU; other matrices take torch"
    if is_rank_0():
        logger.info("muon_backend='auto' takes %s: %s", name, why)
    return name


def backend_names() -> tuple[str, ...]:
    """Return the names of all back ends, installed or not; the first is our own iteration."""
    return tuple(dict.fromkeys(("torch", "auto", *_LOADERS, *_LOADED)))


def register_backend(name: str, backend: Backend) -> None:
    """Make a back end of your own available, or replace one (for instance to give it a group)."""
    _LOADED[name] = backend


def get_backend(name: str) -> Backend | None:
    """Return a back end by name, None for our own iteration.

    What ``auto`` means is loaded, too.

    Raises:
        ConfigurationError: If the name is unknown, or its package or device is absent.
    """
    check_choice("backend", name, backend_names())
    name = automatic() if name == "auto" else name
    if name in _LOADERS and name not in _LOADED:
        _LOADED[name] = _LOADERS[name]()
    return _LOADED.get(name)
