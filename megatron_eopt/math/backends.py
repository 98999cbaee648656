"""Orthogonalization backends: implementations from other packages, chosen by name.

A backend works on *wide* matrices, see :mod:`megatron_eopt.math.newton_schulz`. Known names are
``emerging_optimizers``, ``transformer_engine`` and ``gram_newton_schulz``; others can be
registered. A missing package or an unsupported option raises an error; there is no silent fallback.
``auto`` picks a backend for this machine, see :func:`automatic`.
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
from torch import Tensor

from megatron_eopt.base import gpu
from megatron_eopt.base.agreement import is_rank_0
from megatron_eopt.base.errors import ConfigurationError, check_choice
from megatron_eopt.base.kernels import SWITCH, Family, is_on
from megatron_eopt.math.algorithm import AlgorithmT, IterationPlan
from megatron_eopt.math.coefficients import Triple
from megatron_eopt.math.newton_schulz import normalize
from megatron_eopt.math.precision import matmul_precision
from megatron_eopt.math.products import suits_quack

logger = logging.getLogger(__name__)

PACKAGES = ("gram_newton_schulz", "quack")
"""Packages whose kernels are used if they are installed."""

GRAM_NEWTON_SCHULZ = Family(
    "orthogonalization in gram-newton-schulz",
    lambda device: not _missing() and suits_quack(device),
)


def _missing() -> list[str]:
    return [name for name in PACKAGES if find_spec(name) is None]


type ComputeT = Callable[[Tensor, tuple[Triple, ...], IterationPlan, float], Tensor]
"""Orthogonalizes whole matrices, called as ``(wide, schedule, plan, eps)``.

``wide`` is ``(m, n)`` or ``(batch, m, n)`` with ``m <= n`` and any strides; it is not normalised
and must not be modified. ``schedule`` has one coefficient triple per step, and ``eps`` is the
smallest norm to divide by. Returns a new tensor of the shape of ``wide`` and any float dtype.
"""


@dataclass(frozen=True)
class Backend:
    """An implementation of the orthogonalization."""

    compute: ComputeT
    # supported values of ``algorithm``; the first is used for ``auto``
    algorithms: tuple[AlgorithmT, ...] = ("standard",)
    half: bool = False  # whether it computes in 16 bits only


def _require(name: str, package: str, install: str, present: bool) -> None:
    """Raise a ConfigurationError unless the package is installed and a GPU is visible."""
    if not present:
        rule = f"needs the package {package}"
        raise ConfigurationError("backend", name, rule, f"Install it: pip install {install}")
    if not gpu.is_there():
        rule = "needs an NVIDIA GPU, but none is visible"
        raise ConfigurationError("backend", name, rule, "Use backend='torch'")


def _one_by_one(compute: Callable[[Tensor], Tensor], matrices: Tensor) -> Tensor:
    if matrices.ndim == 2:
        return compute(matrices)
    return torch.stack([compute(matrix) for matrix in matrices])


_MUON_UTILS = "emerging_optimizers.orthogonalized_optimizers.muon_utils"


def _emerging_optimizers() -> Backend:
    """Return emerging-optimizers' own iteration, for updates equal to Megatron's bit for bit.

    In 16 bits, any other order of rounding drifts away from it within a few training steps.
    """

    def compute(
        wide: Tensor, schedule: tuple[Triple, ...], plan: IterationPlan, eps: float
    ) -> Tensor:
        iterate = partial(
            import_module(_MUON_UTILS).newton_schulz,
            steps=len(schedule),
            coefficient_type="custom",
            custom_coefficient_sets=list(schedule),
            eps=eps,
            transpose=False,
        )
        # upstream has no argument for it: it converts to bfloat16 if torch's setting is "medium"
        coarse = plan.dtype == torch.bfloat16
        with matmul_precision("medium" if coarse else None):
            # Upstream takes only float32. It takes stacks, too, but Megatron passes single
            # matrices, and a batched product may be summed in another order.
            return _one_by_one(lambda matrix: iterate(matrix.to(torch.float32)), wide)

    return Backend(compute)


def _gram_newton_schulz() -> Backend:
    """Return the package's kernels, which normalise by themselves, in float16 with our restarts."""
    present = find_spec("gram_newton_schulz") is not None
    _require("gram_newton_schulz", "gram_newton_schulz", "gram-newton-schulz", present)

    @cache
    def solver(schedule: tuple[Triple, ...], plan: IterationPlan, eps: float) -> Any:
        return import_module("gram_newton_schulz").GramNewtonSchulz(
            ns_epsilon=eps,
            ns_coefficients=[list(triple) for triple in schedule],
            use_gram_newton_schulz=plan.algorithm == "gram",
            gram_newton_schulz_reset_iterations=list(plan.restarts),
            # its default also captures CUDA graphs, which reuse the memory of their results and
            # cannot be part of a captured step
            compile_kwargs={"fullgraph": True},
        )

    def compute(
        wide: Tensor, schedule: tuple[Triple, ...], plan: IterationPlan, eps: float
    ) -> Tensor:
        # release 0.1.5 divides float32 matrices in place
        own = wide.clone(memory_format=torch.contiguous_format)
        with GRAM_NEWTON_SCHULZ.launching(own):
            result: Tensor = solver(schedule, plan, eps)(own)
            return result

    return Backend(compute, ("gram", "standard"), half=True)


def transformer_engine(group: dist.ProcessGroup | None = None) -> Backend:
    """Return Transformer Engine's ``newton_schulz``: cuSolverMp on an NCCL process group.

    Args:
        group: Ranks that share the work on each matrix. All of them must make the same calls with
            the same whole matrices. Default: all ranks.

    Raises:
        ConfigurationError: If Transformer Engine, a GPU or ``torch.distributed`` is missing, or it
            was built without cuSolverMp.
    """
    name, present = "transformer_engine", find_spec("transformer_engine") is not None
    _require(name, name, "--no-build-isolation 'transformer-engine[pytorch]'", present)
    if not dist.is_initialized():
        hint = "Call torch.distributed.init_process_group('nccl') first, also for one GPU"
        raise ConfigurationError("backend", name, "needs an NCCL process group", hint)
    module = import_module("transformer_engine.pytorch.newton_schulz")
    try:
        context = module.CusolverMpCtx(group or dist.group.WORLD)
        # some releases notice only here that they were built without the library
        eye = torch.eye(16 * dist.get_world_size(group), device="cuda", dtype=torch.bfloat16)
        module.newton_schulz_tp(eye, context, 1, [(1.5, -0.5, 0.0)])
    except RuntimeError as error:
        rule = f"cannot use cuSolverMp, which Transformer Engine must be built with: {error}"
        hint = "Build it with NVTE_WITH_CUSOLVERMP=1, or use backend='torch'"
        raise ConfigurationError("backend", name, rule, hint) from error

    def compute(
        wide: Tensor, schedule: tuple[Triple, ...], plan: IterationPlan, eps: float
    ) -> Tensor:
        x = normalize(wide, eps, plan.dtype)
        for one in [x] if x.ndim == 2 else x.unbind(0):
            # works in place, so `x` is the result
            module.newton_schulz_tp(one, context, len(schedule), list(schedule))
        return x

    return Backend(compute)


_LOADERS: dict[str, Callable[[], Backend]] = {
    "emerging_optimizers": _emerging_optimizers,
    "transformer_engine": transformer_engine,
    "gram_newton_schulz": _gram_newton_schulz,
}
_LOADED: dict[str, Backend] = {}
_KERNELS = {"transformer_engine", "gram_newton_schulz"}  # that need a GPU


def automatic() -> str:
    """Return the backend that ``auto`` means on this machine, and log the reason on rank 0.

    gram-newton-schulz was the fastest on an H100.
    """
    name, why = "torch", ""
    if not gpu.is_there():
        why = "no NVIDIA GPU is visible"
    elif missing := _missing():
        why = f"{missing[0]} is not installed"
    elif not suits_quack(torch.device("cuda")):
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        why = f"gram_newton_schulz has no kernels for compute capability {capability}"
    elif not GRAM_NEWTON_SCHULZ.runs(torch.empty(0, device="cuda")):
        why = f"kernels of gram_newton_schulz are turned off ({SWITCH}) or failed on a rank"
    else:
        name = "gram_newton_schulz"
        why = "its kernels support this GPU; torch computes what they do not"
    _tell("auto", f"uses {name}: {why} (change with --muon-backend)")
    return name


@cache
def _tell(backend: str, what: str) -> None:
    """Log once what a backend means."""
    if is_rank_0():
        logger.info("muon_backend=%r %s", backend, what)


def backend_names() -> tuple[str, ...]:
    """Return the names of all backends, installed or not; the first is our own iteration."""
    return tuple(dict.fromkeys(("torch", "auto", *_LOADERS, *_LOADED)))


def register_backend(name: str, backend: Backend) -> None:
    """Register a backend under a name, or replace one, for example to give it a process group."""
    _LOADED[name] = backend


def get_backend(name: str) -> Backend | None:
    """Return a backend by name, or None for our own torch iteration. ``auto`` is resolved first.

    If kernels are turned off, our own iteration takes the place of the packages that are kernels.

    Raises:
        ConfigurationError: If the name is unknown, or the package or a GPU is missing.
    """
    check_choice("backend", name, backend_names())
    name = automatic() if name == "auto" else name
    if name in _KERNELS and not is_on():
        _tell(name, f"is replaced by 'torch': {SWITCH}=0 or optimizer_kernels=False")
        return None
    if name in _LOADERS and name not in _LOADED:
        _LOADED[name] = _LOADERS[name]()
    return _LOADED.get(name)
