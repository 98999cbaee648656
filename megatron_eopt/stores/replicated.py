"""Weights and state on every data-parallel rank: tensor-parallel slabs, or all of a weight."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import MAIN_OF_REPLICATED, TpModeT
from megatron_eopt.matrices import Split
from megatron_eopt.routing.parameters import cut_dimension
from megatron_eopt.stores.interface import Stored
from megatron_eopt.stores.shard import Fragment, Ranks, Shard, fragment_layouts

type SplitOf = Callable[[Tensor, tuple[int, ...]], Split]
"""Returns the logical matrices of a parameter of the given unsharded shape."""


def tensor_parallel_cut(
    param: Tensor, pg_collection: Any, mode: TpModeT = "blockwise"
) -> tuple[int, dist.ProcessGroup | None]:
    """Return the dimension in which tensor parallelism cuts a parameter, and the slabs' ranks.

    Args:
        param: ``allreduce = False`` or ``expert_tp`` marks an expert's; see
            :func:`~megatron_eopt.routing.parameters.cut_dimension` for the dimension.
        pg_collection: Process groups with ``tp`` and, for experts, ``expt_tp``.
        mode: Where the work will happen.

    Returns:
        (-1, None) if nothing is cut.

    Raises:
        ConfigurationError: If the parameter is cut and there is no group, or weight
            rematerialization cuts its rows once more.
    """
    is_expert = getattr(param, "expert_tp", False) or not getattr(param, "allreduce", True)
    remat = getattr(pg_collection, "expt_gtp_remat" if is_expert else "gtp_remat", None)
    refuse_rematerialized(f"a parameter of shape {tuple(param.shape)}", param, remat)
    dim = cut_dimension(param)
    if dim == -1:
        return -1, None
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


def refuse_rematerialized(name: str, param: Tensor, group: dist.ProcessGroup | None) -> None:
    """Raise if weight rematerialization cuts a matrix's rows once more.

    Args:
        name: What the parameter is, for the message.
        param: The parameter.
        group: The ranks that it would be cut over; None if they are not known.

    Raises:
        ConfigurationError: If it does.
    """
    if not getattr(param, "is_gtp_weight_remat", False):
        return
    if group is None or dist.get_world_size(group) > 1:
        raise ConfigurationError(
            "is_gtp_weight_remat",
            True,
            f"the rows of {name} must not be cut once more",
            "Turn weight rematerialization off for the matrices that Muon gets",
        )


def slab(
    name: str, param: Tensor, split_of: SplitOf, cut: tuple[int, dist.ProcessGroup | None]
) -> Shard:
    """Return a tensor-parallel slab, or a whole parameter, as a shard.

    Args:
        name: Its name.
        param: The local weight.
        split_of: Its logical matrices.
        cut: What :func:`tensor_parallel_cut` returned.
    """
    dim, group = cut
    ranks = Ranks.of(group)
    shape = list(param.shape)
    if dim != -1:
        shape[dim - 2] *= ranks.size
    split = split_of(param, tuple(shape))
    fragments = [Fragment(rank, 0, param.numel()) for rank in range(ranks.size)]
    layouts = fragment_layouts(split, dim, ranks.size, fragments)
    return Shard(name, split, layouts, ranks, tuple(param.shape))


class _Replicated:
    """What both wrappers have in common; stands before megatron-core's in their bases."""

    optimizer: Any
    steps: int = 0
    is_stub_optimizer: bool
    grad_scaler: Any = None

    def tensors_of(self, item: Stored) -> dict[str, Any]:
        """Return main weights, where they are not the model's, and state, by kind."""
        main = {} if item.main is item.param else {MAIN_OF_REPLICATED: item.main.detach()}
        return {**main, **self.optimizer.state[item.main]}

    def put_tensors(self, item: Stored, tensors: Mapping[str, Any]) -> None:
        """Nothing to do: the tensors are those that are kept."""

    def gather_params(self, *, now: bool = False) -> None:
        """Nothing to do: every rank has stepped all weights."""

    def replica_of(self, replica: Any) -> tuple[int, ...]:
        """Return the model's own: state is copied as the parameter is."""
        return replica if isinstance(replica, tuple) else (replica,)

    def replica_of_matrix(self, replica: Any) -> tuple[int, ...]:
        """Return the same."""
        return self.replica_of(replica)

    def step_with_ready_grads(self) -> bool:
        """Step, and count the step if it was done."""
        done = bool(super().step_with_ready_grads())  # type: ignore[misc]
        self.steps += done
        return done


class MainParamsOptimizer(_Replicated, Float16OptimizerWithFloat16Params):
    """For bf16 and fp16: steps on float32 copies of the parameters."""

    def collect_gradients(self) -> None:
        """Copy the model's gradients to the main weights, in float32."""
        if not self.is_stub_optimizer:
            self._copy_model_grads_to_main_grads()

    def stored(self) -> Iterator[Stored]:
        """Yield the parameters with their main copies, in the order of the groups."""
        if self.is_stub_optimizer:
            return
        model_of = {
            main: model
            for models, mains in zip(
                self.float16_groups, self.fp32_from_float16_groups, strict=True
            )
            for model, main in zip(models, mains, strict=True)
        }
        for group in self.optimizer.param_groups:
            for main in group["params"]:
                yield Stored(model_of.get(main, main), main, 0, main.numel())


class Float32Optimizer(_Replicated, FP32Optimizer):
    """For float32: steps on the parameters themselves."""

    def collect_gradients(self) -> None:
        """Let the parameters have the gradients that DDP keeps for them."""
        self.prepare_grads()

    def stored(self) -> Iterator[Stored]:
        """Yield the parameters, in the order of the groups."""
        if self.is_stub_optimizer:
            return
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                yield Stored(param, param, 0, param.numel())
