"""Storage of whole parameters, or whole tensor-parallel shards, on every data-parallel rank."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import MAIN_OF_REPLICATED, TpModeT
from megatron_eopt.matrices import Split
from megatron_eopt.routing.parameters import cut_dimension
from megatron_eopt.storage.interface import MainShard, Storage
from megatron_eopt.storage.shard import Fragment, Ranks, Shard, fragment_layouts, global_name

type SplitOf = Callable[[Tensor, tuple[int, ...]], Split]
"""Returns the logical matrices of a parameter, given its unsharded shape."""


def tensor_parallel_cut(
    param: Tensor, pg_collection: Any, mode: TpModeT = "blockwise"
) -> tuple[int, dist.ProcessGroup | None]:
    """Return the dimension in which tensor parallelism cuts a parameter, and the group.

    Returns ``(-1, None)`` if nothing is cut. Parameters with ``allreduce = False`` or ``expert_tp``
    belong to experts and use the group ``expt_tp`` instead of ``tp``.

    Raises:
        ConfigurationError: If the parameter is cut and the group is missing, or weight
            rematerialization cuts its rows again.
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
        shape = tuple(param.shape)
        rule = f"must have the group {name!r}, because a parameter of shape {shape} is cut"
        hint = "Pass the model's process groups, or set partition_dim to -1 if nothing is cut"
        raise ConfigurationError("pg_collection", pg_collection, rule, hint)
    if group is None or dist.get_world_size(group) == 1:
        return -1, None
    return dim, group


def refuse_rematerialized(name: str, param: Tensor, group: dist.ProcessGroup | None) -> None:
    """Raise a ConfigurationError if weight rematerialization cuts rows again (over ``group``)."""
    cuts = group is None or dist.get_world_size(group) > 1
    if cuts and getattr(param, "is_gtp_weight_remat", False):
        rule = f"cuts the rows of {name} once more, which is not supported"
        hint = "Turn weight rematerialization off for the parameters that Muon trains"
        raise ConfigurationError("is_gtp_weight_remat", True, rule, hint)


def slab(
    name: str, param: Tensor, split_of: SplitOf, cut: tuple[int, dist.ProcessGroup | None]
) -> Shard:
    """Return the shard of a local parameter, cut as :func:`tensor_parallel_cut` returned."""
    dim, group = cut
    ranks = Ranks.of(group)
    shape = list(param.shape)
    if dim != -1:
        shape[dim - 2] *= ranks.size
    split = split_of(param, tuple(shape))
    fragments = [Fragment(rank, 0, param.numel()) for rank in range(ranks.size)]
    layouts = fragment_layouts(split, dim, ranks.size, fragments)
    return Shard(
        name, split, layouts, ranks, tuple(param.shape), global_name=global_name(param, name)
    )


class Replicated(Storage):
    """What wrappers of whole parameters have in common; a mixin for megatron-core's."""

    def tensors_of(self, item: MainShard) -> dict[str, Any]:
        """Return main weights, unless they are the model's, and state, by kind."""
        main = {} if item.main is item.param else {MAIN_OF_REPLICATED: item.main.detach()}
        return {**main, **self.optimizer.state[item.main]}

    def common_state(self, steps: Sequence[int], main: str | None) -> dict[str, Any]:
        """Return what checkpoints store once for all ranks."""
        groups = [
            {k: v for k, v in group.items() if k != "params" and (k, v) != ("optimizer", main)}
            for group in self.optimizer.param_groups
        ]
        done = max(steps, default=-1)
        counted = {"state": {"common_step": torch.tensor(float(done))}} if done >= 0 else {}
        return {"param_groups": groups, **counted}

    def main_shards(self) -> Iterator[MainShard]:
        """Yield the parameters with the tensors that are stepped, in the order of the groups."""
        if not self.is_stub_optimizer:
            model_of = self._model_of()
            for group in self.optimizer.param_groups:
                for main in group["params"]:
                    yield MainShard(model_of.get(main, main), main, 0, main.numel())

    def _model_of(self) -> dict[Tensor, Tensor]:
        """Return the parameter of each main weight."""
        return {}


class MainParamsOptimizer(Replicated, Float16OptimizerWithFloat16Params):
    """For bf16 and fp16: steps float32 copies of the parameters."""

    def common_state(self, steps: Sequence[int], main: str | None) -> dict[str, Any]:
        """Return the same in the format of megatron-core's wrapper, with the loss scale."""
        scale = {"grad_scaler": self.grad_scaler.state_dict()} if self.grad_scaler else {}
        return {"optimizer": super().common_state(steps, main), **scale}

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Return all main weights with their parameters."""
        return [(main, model.detach()) for main, model in self._model_of().items()]

    def _copy_model_grads_to_main_grads(self) -> None:
        """Hand gradients to the stepped tensors; a model without DDP has only torch's own."""
        for item in self.main_shards():
            grad = getattr(item.param, "main_grad", item.param.grad)
            if item.main is item.param:
                item.main.grad = grad
            else:
                item.main.grad = None if grad is None else grad.float()
                item.param.grad = None

    def _copy_main_params_to_model_params(self) -> None:
        self.copy_mains()

    def _model_of(self) -> dict[Tensor, Tensor]:
        groups = zip(self.fp32_from_float16_groups, self.float16_groups, strict=True)
        return {main: model for pair in groups for main, model in zip(*pair, strict=True)}


class Float32Optimizer(Replicated, FP32Optimizer):
    """For float32: steps the parameters themselves."""

    def collect_gradients(self) -> None:
        """Hand DDP's gradients to the parameters."""
        self.prepare_grads()
