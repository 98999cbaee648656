"""Which engine serves which parameters: one per process group that cuts them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import TpModeT
from megatron_eopt.layouts import Buffers
from megatron_eopt.matrices import Split
from megatron_eopt.optimizers.engine import MatrixEngine, UpdateT
from megatron_eopt.optimizers.stored import Fragment, StoredParameter

__all__ = ["ParameterEngines", "TensorParallelCut", "tensor_parallel_cut"]

type TensorParallelCut = tuple[int, dist.ProcessGroup | None]
"""Dimension that is cut (-1: none) and the ranks that hold the slabs."""


def tensor_parallel_cut(param: Tensor, pg_collection: Any, mode: TpModeT) -> TensorParallelCut:
    """Return how tensor parallelism cuts a parameter.

    Args:
        param: Its attribute ``partition_dim`` says which dimension is cut, -1 or absent for none;
            ``tensor_model_parallel = False`` overrules it, since Transformer Engine sets the
            dimension on duplicated weights too. ``allreduce = False`` or ``expert_tp`` marks an
            expert's.
        pg_collection: Process groups with ``tp`` and, for experts, ``expt_tp``.
        mode: Where the work will happen.

    Raises:
        ConfigurationError: If the parameter is cut and there is no group, or weight
            rematerialization cuts its rows once more.
    """
    is_expert = getattr(param, "expert_tp", False) or not getattr(param, "allreduce", True)
    _refuse_rematerialized(param, pg_collection, is_expert)
    dim = getattr(param, "partition_dim", -1)
    if dim == -1 or not getattr(param, "tensor_model_parallel", True):
        return -1, None
    if dim not in (0, 1):
        rule = "must be 0 (rows cut), 1 (columns cut) or -1 (not cut)"
        raise ConfigurationError("partition_dim", dim, rule, "Set one of these")
    name = "expt_tp" if is_expert else "tp"
    group = getattr(pg_collection, name, None)
    if group is None and mode != "blockwise":
        raise ConfigurationError(
            "pg_collection",
            pg_collection,
            f"must have the group {name!r}, since a parameter of shape {tuple(param.shape)} "
            f"has partition_dim {dim}",
            "Pass the model's process groups, or set partition_dim to -1 if nothing is cut",
        )
    if group is None or dist.get_world_size(group) == 1:
        return -1, None
    return dim, group


def _refuse_rematerialized(param: Tensor, pg_collection: Any, is_expert: bool) -> None:
    if not getattr(param, "is_gtp_weight_remat", False):
        return
    name = "expt_gtp_remat" if is_expert else "gtp_remat"
    group = getattr(pg_collection, name, None)
    if group is None or dist.get_world_size(group) > 1:
        raise ConfigurationError(
            "is_gtp_weight_remat",
            True,
            f"the rows of a parameter of shape {tuple(param.shape)} must not be cut once more "
            f"over the ranks of {name!r}",
            "Turn weight rematerialization off for the matrices that Muon gets",
        )


class ParameterEngines:
    """Computes the updates of parameters, whichever process groups cut them.

    Engines are built at their first use, when all ranks of a group take part, and kept for every
    set of parameters that comes together.

    Args:
        update: The arithmetic, see :data:`~megatron_eopt.optimizers.engine.UpdateT`.
        cut_of: How tensor parallelism cuts a parameter.
        split_of: The logical matrices of a parameter of the given unsharded shape.
        name_of: A parameter's name.
        mode: Where the work on cut parameters happens.
        batched: See :class:`MatrixEngine`.
        dtype: See :class:`MatrixEngine`.
    """

    def __init__(
        self,
        update: UpdateT,
        *,
        cut_of: Callable[[Tensor], TensorParallelCut],
        split_of: Callable[[Tensor, tuple[int, ...]], Split],
        name_of: Callable[[Tensor], str],
        mode: TpModeT,
        batched: bool,
        dtype: torch.dtype,
    ) -> None:
        self._update = update
        self._cut_of = cut_of
        self._split_of = split_of
        self._name_of = name_of
        self._mode = mode
        self._batched = batched
        self._dtype = dtype
        self._buffers = Buffers()
        self._built: dict[tuple[Tensor, ...], list[tuple[list[int], MatrixEngine]]] = {}

    def updates(self, params: Sequence[Tensor], directions: Sequence[Tensor]) -> list[Tensor]:
        """Return the updates of ``params``; collective over the groups that cut them.

        Args:
            params: Local weights.
            directions: What to orthogonalize, of the same shapes.

        Returns:
            float32 tensors of the same shapes.
        """
        results: list[Tensor] = [torch.empty(0)] * len(params)
        for members, engine in self.of(params):
            updates = engine.updates([directions[i] for i in members])
            for i, update in zip(members, updates, strict=True):
                results[i] = update
        return results

    def of(self, params: Sequence[Tensor]) -> list[tuple[list[int], MatrixEngine]]:
        """Return the engines for these parameters, each with the places it serves."""
        key = tuple(params)
        if key not in self._built:
            self._built[key] = self._build(params)
        return self._built[key]

    def _build(self, params: Sequence[Tensor]) -> list[tuple[list[int], MatrixEngine]]:
        members: dict[dist.ProcessGroup | None, list[int]] = {}
        for i, param in enumerate(params):
            members.setdefault(self._cut_of(param)[1], []).append(i)
        engines = []
        for group, places in members.items():
            names = [f"{self._name_of(params[i])}" for i in places]
            if len(set(names)) < len(names):
                names = [f"{name}#{i}" for name, i in zip(names, places, strict=True)]
            stored = [self.stored(name, params[i]) for name, i in zip(names, places, strict=True)]
            engine = MatrixEngine(
                stored,
                self._update,
                group,
                mode=self._mode,
                batched=self._batched,
                dtype=self._dtype,
                device=params[places[0]].device,
                buffers=self._buffers,
            )
            engines.append((places, engine))
        return engines

    def stored(self, name: str, param: Tensor) -> StoredParameter:
        """Return how the group that cuts a parameter stores it."""
        dim, group = self._cut_of(param)
        tp_size = 1 if group is None else dist.get_world_size(group)
        shape = list(param.shape)
        if dim != -1:
            shape[dim - 2] *= tp_size
        split = self._split_of(param, tuple(shape))
        fragments = tuple(Fragment(rank, 0, param.numel()) for rank in range(tp_size))
        return StoredParameter(name, split, dim, tp_size, fragments)
