"""Who computes the iteration: our torch code, or another package by name.

A back end is a function on *wide* matrices (see :mod:`megatron_eopt.math.newton_schulz`). The names
``torch``, ``emerging_optimizers``, ``syrk``, ``transformer_engine`` and ``gram_newton_schulz`` are
known; others can be registered. Asking for one whose package is absent is an error, never a
fall-back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError, check_choice
from megatron_eopt.math import external
from megatron_eopt.math.algorithm import AlgorithmT, Plan
from megatron_eopt.math.coefficients import Triple
from megatron_eopt.math.gram import iterate_gram
from megatron_eopt.math.newton_schulz import ReduceT, iterate_standard, normalize


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
    """A plug.

    Attributes:
        compute: Does the work.
        algorithms: What it can be asked for; the first is what ``auto`` means to it.
        distributed: Whether it can work on a matrix whose long side is cut over ranks.
        linear_in_last_step: Whether it takes the triples as they are, so that a factor on the last
            one is a factor on the result.
    """

    compute: Compute
    algorithms: tuple[AlgorithmT, ...] = ("standard",)
    distributed: bool = False
    linear_in_last_step: bool = False

    def algorithm(self, name: str, asked: AlgorithmT) -> AlgorithmT:
        """Return what to plan for; raise a ConfigurationError if it cannot do what was asked."""
        if asked in self.algorithms:
            return asked
        if asked == "auto":
            return self.algorithms[0]
        raise ConfigurationError(
            "algorithm",
            asked,
            f"back end {name!r} computes {' or '.join(self.algorithms)}",
            "Choose auto, or backend='torch'",
        )


# A core's second-level cache: a CPU runs a batch in chunks that stay inside it, which measured
# 1.2x on 64 matrices of 128 x 512. A GPU wants the whole batch at once.
_CHUNK_BYTES = 2 << 20


def chunk_size(wide: Tensor, dtype: torch.dtype, reduce: ReduceT | None) -> int:
    """Return how many matrices of a batch to take at once.

    Args:
        wide: ``(batch, m, n)``.
        dtype: Of the products' operands.
        reduce: Sums over ranks, if they share the matrices.
    """
    batch = wide.shape[0]
    # every chunk would cost its own sums over the ranks
    if wide.device.type != "cpu" or reduce is not None:
        return batch
    matrix = wide.shape[-2] * wide.shape[-1] * dtype.itemsize
    # threads share a batched product by matrices
    return min(batch, torch.get_num_threads() * max(1, _CHUNK_BYTES // matrix))


def _compute_torch(
    wide: Tensor,
    schedule: tuple[Triple, ...],
    plan: Plan,
    *,
    eps: float,
    reduce: ReduceT | None,
    columns: int,
) -> Tensor:
    if wide.ndim == 3 and (size := chunk_size(wide, plan.dtype, reduce)) < wide.shape[0]:
        parts = [
            _compute_torch(part, schedule, plan, eps=eps, reduce=reduce, columns=columns)
            for part in torch.split(wide, size)
        ]
        return torch.cat(parts)
    tall = wide.stride(-2) < wide.stride(-1)
    x = normalize(wide.mT if tall else wide, eps, plan.dtype, reduce)
    if plan.algorithm == "standard":
        x = iterate_standard(x, schedule, reduce, tall=tall)
    else:
        x = iterate_gram(
            x,
            schedule,
            plan.restarts,
            reduce,
            columns=columns,
            tall=tall,
            shifted=plan.shifted,
        )
    return x.mT if tall else x


def _load_torch() -> Backend:
    algorithms: tuple[AlgorithmT, ...] = ("auto", "standard", "gram")
    return Backend(_compute_torch, algorithms, distributed=True, linear_in_last_step=True)


def _load_emerging_optimizers() -> Backend:
    return Backend(external.compute_emerging_optimizers)


def _load_syrk() -> Backend:
    external.require_syrk()
    return Backend(external.compute_syrk)


def _load_transformer_engine() -> Backend:
    return Backend(external.TransformerEngine())


def _load_gram_newton_schulz() -> Backend:
    external.require_gram_newton_schulz()
    return Backend(external.compute_gram_newton_schulz, ("gram", "standard"))


_LOADERS: dict[str, Callable[[], Backend]] = {
    "torch": _load_torch,
    "emerging_optimizers": _load_emerging_optimizers,
    "syrk": _load_syrk,
    "transformer_engine": _load_transformer_engine,
    "gram_newton_schulz": _load_gram_newton_schulz,
}
_LOADED: dict[str, Backend] = {}


def backend_names() -> tuple[str, ...]:
    """Return the names of all back ends, installed or not."""
    return tuple(dict.fromkeys((*_LOADERS, *_LOADED)))


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
