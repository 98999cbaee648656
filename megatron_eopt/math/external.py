"""The iteration as other packages compute it; all but emerging-optimizers' plain one need a GPU.

Each works on *wide* matrices like our own (see :mod:`megatron_eopt.math.backends`). What it cannot
do is refused with the way out: nothing here falls back to another back end.
"""

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from emerging_optimizers import triton_kernels
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from emerging_optimizers.utils import fp32_matmul_precision
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.math.algorithm import Plan
from megatron_eopt.math.coefficients import Triple
from megatron_eopt.math.newton_schulz import ReduceT, normalize


def require_package(backend: str, module: str, install: str) -> None:
    """Raise a ConfigurationError that names the package unless ``module`` can be imported."""
    if find_spec(module) is None:
        raise ConfigurationError(
            "backend", backend, f"needs the package {module}", f"Install it: {install}"
        )


def _require_gpu(backend: str) -> None:
    if not torch.cuda.is_available():
        raise ConfigurationError(
            "backend", backend, "needs an NVIDIA GPU and none is visible", "Use backend='torch'"
        )


def _require_whole(backend: str, reduce: ReduceT | None) -> None:
    if reduce is not None:
        raise ConfigurationError(
            "backend",
            backend,
            "computes whole matrices, and this one's long side is cut over ranks",
            "Use backend='torch', or another TP mode than distributed",
        )


def _require_half(backend: str, plan: Plan) -> None:
    if plan.dtype != torch.bfloat16:
        raise ConfigurationError(
            "backend", backend, "computes in 16 bits only", "Use it with precision='medium'"
        )


def compute_emerging_optimizers(
    wide: Tensor,
    schedule: tuple[Triple, ...],
    plan: Plan,
    *,
    eps: float,
    reduce: ReduceT | None,
    columns: int,
) -> Tensor:
    """Run emerging-optimizers' own iteration, matrix by matrix: bit for bit what Megatron gets.

    In 16 bits two ways to round drift apart within a few training steps, however exact both are.
    """
    _require_whole("emerging_optimizers", reduce)
    coarse = plan.dtype == torch.bfloat16
    with fp32_matmul_precision("medium" if coarse else torch.get_float32_matmul_precision()):
        results = [
            muon_utils.newton_schulz(
                matrix.to(torch.float32),
                len(schedule),
                "custom",
                custom_coefficient_sets=list(schedule),
                eps=eps,
                transpose=False,
            )
            for matrix in (wide if wide.ndim == 3 else wide.unsqueeze(0))
        ]
    return torch.stack(results) if wide.ndim == 3 else results[0]


def require_syrk() -> None:
    """Check emerging-optimizers' Triton kernels: Triton with tensor descriptors, and a GPU."""
    if not triton_kernels.HAS_TRITON_340:
        raise ConfigurationError(
            "backend",
            "syrk",
            "needs the package triton >= 3.4",
            "Install it: pip install 'triton>=3.4'",
        )
    _require_gpu("syrk")


def compute_syrk(
    wide: Tensor,
    schedule: tuple[Triple, ...],
    plan: Plan,
    *,
    eps: float,
    reduce: ReduceT | None,
    columns: int,
) -> Tensor:
    """Run the standard iteration on kernels that compute half of each symmetric product."""
    _require_half("syrk", plan)
    _require_whole("syrk", reduce)
    x = normalize(wide, eps, plan.dtype)
    matrices = [x] if x.ndim == 2 else list(x.unbind(0))
    for a, b, c in schedule:
        # the kernels take one matrix at a time
        matrices = [muon_utils.newton_schulz_step_tsyrk(one, a, b, c) for one in matrices]
    return matrices[0] if x.ndim == 2 else torch.stack(matrices)


def require_gram_newton_schulz() -> None:
    """Check the package gram-newton-schulz and a GPU."""
    require_package("gram_newton_schulz", "gram_newton_schulz", "pip install gram-newton-schulz")
    _require_gpu("gram_newton_schulz")


@lru_cache(maxsize=64)
def _gram_newton_schulz(schedule: tuple[Triple, ...], plan: Plan, eps: float) -> Any:
    package = import_module("gram_newton_schulz")
    return package.GramNewtonSchulz(
        ns_epsilon=eps,
        ns_coefficients=[list(triple) for triple in schedule],
        use_gram_newton_schulz=plan.algorithm == "gram",
        gram_newton_schulz_reset_iterations=list(plan.restarts),
    )


def compute_gram_newton_schulz(
    wide: Tensor,
    schedule: tuple[Triple, ...],
    plan: Plan,
    *,
    eps: float,
    reduce: ReduceT | None,
    columns: int,
) -> Tensor:
    """Run the package's kernels, in float16 and with our restarts; it normalises by itself."""
    _require_half("gram_newton_schulz", plan)
    _require_whole("gram_newton_schulz", reduce)
    # the package's graphs reuse their output buffer, hence the copy
    result: Tensor = _gram_newton_schulz(schedule, plan, eps)(wide.contiguous()).clone()
    return result


class TransformerEngine:
    """Transformer Engine's ``newton_schulz``: cuSolverMp over an NCCL process group.

    Args:
        group: The ranks among which the library spreads a matrix; every one of them makes the same
            calls with the same whole matrices. Default: all ranks.

    Raises:
        ConfigurationError: If Transformer Engine, a GPU or ``torch.distributed`` is absent.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        name = "transformer_engine"
        require_package(
            name, name, "pip install --no-build-isolation 'transformer-engine[pytorch]'"
        )
        _require_gpu(name)
        if not dist.is_initialized():
            raise ConfigurationError(
                "backend",
                name,
                "needs an NCCL process group",
                "Call torch.distributed.init_process_group('nccl') first, also for one GPU",
            )
        self._module = import_module("transformer_engine.pytorch.newton_schulz")
        self._context = self._module.CusolverMpCtx(group or dist.group.WORLD)

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
        """Run the library's iteration, matrix by matrix, in place on a normalised copy."""
        _require_whole("transformer_engine", reduce)
        x = normalize(wide, eps, plan.dtype)
        for one in [x] if x.ndim == 2 else x.unbind(0):
            self._module.newton_schulz_tp(one, self._context, len(schedule), list(schedule))
        return x
