"""Who computes the iteration: our torch code, or another package by name.

A back end is a function on *wide* matrices (see :mod:`megatron_eopt.math.newton_schulz`). The names
``torch``, ``emerging_optimizers``, ``syrk``, ``transformer_engine`` and ``gram_newton_schulz`` are
known; others can be registered. Asking for one whose package is absent, or for something that it
cannot do, is an error, never a fall-back.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

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
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.math.normalization import normalize


class Compute(Protocol):
    """The work of a back end."""

    def __call__(
        self,
        wide: Tensor,
        schedule: tuple[Triple, ...],
        plan: Plan,
        *,
        eps: float,
        reduce: ReduceT | None,
        columns: int,
    ) -> Tensor:
        """Orthogonalize ``wide``, ``(m, n)`` or ``(batch, m, n)`` with ``m <= n`` as a whole.

        Args:
            wide: Not modified; any strides; not normalised.
            schedule: One coefficient triple per step.
            plan: Algorithm, restarts and operand dtype.
            eps: Smallest norm to divide by.
            reduce: Sums over the ranks that hold the other columns; None if there are none.
            columns: Columns of the whole matrix.

        Returns:
            A new tensor shaped like ``wide``, of any float dtype.
        """


@dataclass(frozen=True)
class Backend:
    """A plug."""

    compute: Compute  # does the work
    # what it can be asked for; the first is what ``auto`` means to it
    algorithms: tuple[AlgorithmT, ...] = ("standard",)
    distributed: bool = False  # whether it can work on a matrix whose long side is cut over ranks
    # whether it takes the triples as they are, so that a factor on the last is one on the result
    linear_in_last_step: bool = False
    writes_out: bool = False  # whether it takes a tensor ``out`` to write to, which may be ``wide``

    def algorithm(self, name: str, asked: AlgorithmT) -> AlgorithmT:
        """Return what to plan for; a ConfigurationError if it cannot do what was asked."""
        if asked in self.algorithms:
            return asked
        if asked == "auto":
            return self.algorithms[0]
        rule = f"back end {name!r} computes {' or '.join(self.algorithms)}"
        raise ConfigurationError("algorithm", asked, rule, "Choose auto, or backend='torch'")


class _WholeMatrices:
    """Another package's iteration, for matrices that no rank shares with others."""

    name: str  # the back end's
    half = False  # whether it computes in 16 bits only

    def __call__(
        self,
        wide: Tensor,
        schedule: tuple[Triple, ...],
        plan: Plan,
        *,
        eps: float,
        reduce: ReduceT | None,
        columns: int,
    ) -> Tensor:
        """Refuse what the package cannot do, and do the rest."""
        if self.half and plan.dtype != torch.bfloat16:
            raise self.error("computes in 16 bits only", "Use it with precision='medium'")
        if reduce is not None:
            rule = "computes whole matrices, and this one's long side is cut over ranks"
            raise self.error(rule, "Use backend='torch', or another TP mode than distributed")
        return self.iterate(wide, schedule, plan, eps)

    def iterate(self, wide: Tensor, schedule: tuple[Triple, ...], plan: Plan, eps: float) -> Tensor:
        """Do the work on whole matrices."""
        raise NotImplementedError

    def error(self, rule: str, way_out: str) -> ConfigurationError:
        """Return the error that this back end breaks ``rule``."""
        return ConfigurationError("backend", self.name, rule, way_out)

    def require(self, package: str, install: str, present: bool) -> None:
        """Raise a ConfigurationError unless the package is present, and a GPU."""
        if not present:
            raise self.error(f"needs the package {package}", f"Install it: pip install {install}")
        if not gpu.is_there():
            raise self.error("needs an NVIDIA GPU and none is visible", "Use backend='torch'")


def _one_by_one(compute: Callable[[Tensor], Tensor], matrices: Tensor) -> Tensor:
    if matrices.ndim == 2:
        return compute(matrices)
    return torch.stack([compute(matrix) for matrix in matrices])


class _EmergingOptimizers(_WholeMatrices):
    """emerging-optimizers' own iteration: bit for bit what Megatron gets.

    In 16 bits two ways to round drift apart within a few training steps, however exact both are.
    """

    name = "emerging_optimizers"

    def __init__(self) -> None:
        self._iterate = needed("newton_schulz")

    def iterate(self, wide: Tensor, schedule: tuple[Triple, ...], plan: Plan, eps: float) -> Tensor:
        compute = partial(
            self._iterate,
            steps=len(schedule),
            coefficient_type="custom",
            custom_coefficient_sets=list(schedule),
            eps=eps,
            transpose=False,
        )
        coarse = plan.dtype == torch.bfloat16
        with fp32_matmul_precision("medium" if coarse else torch.get_float32_matmul_precision()):
            return _one_by_one(lambda matrix: compute(matrix.to(torch.float32)), wide)


class _Syrk(_WholeMatrices):
    """The standard iteration on Triton kernels that compute half of each symmetric product."""

    name, half = "syrk", True

    def __init__(self) -> None:
        # with tensor descriptors
        self.require("triton >= 3.4", "'triton>=3.4'", bool(found("HAS_TRITON_340")))
        self._step = needed("newton_schulz_step_tsyrk")

    def iterate(self, wide: Tensor, schedule: tuple[Triple, ...], plan: Plan, eps: float) -> Tensor:
        def compute(x: Tensor) -> Tensor:
            for a, b, c in schedule:
                x = self._step(x, a, b, c)
            return x

        return _one_by_one(compute, normalize(wide, eps, plan.dtype))


class _GramNewtonSchulz(_WholeMatrices):
    """The package's kernels, in float16 and with our restarts; it normalises by itself."""

    name, half = "gram_newton_schulz", True

    def __init__(self) -> None:
        present = find_spec("gram_newton_schulz") is not None
        self.require(self.name, "gram-newton-schulz", present)

    def iterate(self, wide: Tensor, schedule: tuple[Triple, ...], plan: Plan, eps: float) -> Tensor:
        # the package's graphs reuse their output buffer, hence the copy
        result: Tensor = self._solver(schedule, plan, eps)(wide.contiguous()).clone()
        return result

    @staticmethod
    @cache
    def _solver(schedule: tuple[Triple, ...], plan: Plan, eps: float) -> Any:
        return import_module("gram_newton_schulz").GramNewtonSchulz(
            ns_epsilon=eps,
            ns_coefficients=[list(triple) for triple in schedule],
            use_gram_newton_schulz=plan.algorithm == "gram",
            gram_newton_schulz_reset_iterations=list(plan.restarts),
        )


class TransformerEngine(_WholeMatrices):
    """Transformer Engine's ``newton_schulz``: cuSolverMp over an NCCL process group.

    Args:
        group: The ranks among which the library spreads a matrix; every one of them makes the same
            calls with the same whole matrices. Default: all ranks.

    Raises:
        ConfigurationError: If Transformer Engine, a GPU or ``torch.distributed`` is absent.
    """

    name = "transformer_engine"

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        present = find_spec("transformer_engine") is not None
        self.require(self.name, "--no-build-isolation 'transformer-engine[pytorch]'", present)
        if not dist.is_initialized():
            way_out = "Call torch.distributed.init_process_group('nccl') first, also for one GPU"
            raise self.error("needs an NCCL process group", way_out)
        self._module = import_module("transformer_engine.pytorch.newton_schulz")
        self._context = self._module.CusolverMpCtx(group or dist.group.WORLD)

    def iterate(self, wide: Tensor, schedule: tuple[Triple, ...], plan: Plan, eps: float) -> Tensor:
        """Run the library's iteration, matrix by matrix, in place on a normalised copy."""
        x = normalize(wide, eps, plan.dtype)
        for one in [x] if x.ndim == 2 else x.unbind(0):
            self._module.newton_schulz_tp(one, self._context, len(schedule), list(schedule))
        return x


_LOADERS: dict[str, Callable[[], Backend]] = {
    "emerging_optimizers": lambda: Backend(_EmergingOptimizers()),
    "syrk": lambda: Backend(_Syrk()),
    "transformer_engine": lambda: Backend(TransformerEngine()),
    "gram_newton_schulz": lambda: Backend(_GramNewtonSchulz(), ("gram", "standard")),
}
_LOADED: dict[str, Backend] = {}


def backend_names() -> tuple[str, ...]:
    """Return the names of all back ends, installed or not."""
    return tuple(dict.fromkeys(("torch", *_LOADERS, *_LOADED)))


def register_backend(name: str, backend: Backend) -> None:
    """Make a back end of your own available, or replace one (for instance to give it a group)."""
    _LOADED[name] = backend


def get_backend(name: str) -> Backend:
    """Return a back end by name.

    Raises:
        ConfigurationError: If the name is unknown, or its package or device is absent.
    """
    check_choice("backend", name, backend_names())
    if name not in _LOADED:
        _LOADED[name] = _LOADERS[name]()
    return _LOADED[name]


def on_syrk(name: str, precision: str, *, whole: bool) -> str:
    """Return the back end of SYRK kernels for who prefers them, or ``name`` and warn.

    megatron-core goes on without them, too, where they cannot be used.

    Args:
        name: The back end otherwise.
        precision: That of the products.
        whole: Whether matrices are whole.

    Raises:
        ConfigurationError: If ``name`` is one of another package.
    """
    if name not in ("torch", "emerging_optimizers", "syrk"):
        rule = f"asks for kernels of emerging-optimizers, and backend={name!r} for others"
        raise ConfigurationError("use_syrk", True, rule, "Give one of them")
    reason = "" if whole else "they compute whole matrices, unlike tp_mode='distributed'"
    if precision != "medium":
        reason = f"they compute in 16 bits, and the precision is {precision!r}"
    if not reason:
        try:
            get_backend("syrk")
        except ConfigurationError as error:
            reason = str(error)
    if reason and is_rank_0():
        warnings.warn(f"use_syrk=True has no effect: {reason}", stacklevel=3)
    return name if reason else "syrk"
