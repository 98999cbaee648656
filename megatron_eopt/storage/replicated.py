"""Storage of whole parameters, or whole tensor-parallel shards, on every data-parallel rank."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import Tensor

from megatron_eopt.base.agreement import gather_objects, group_of_members
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import MAIN_OF_REPLICATED, TpModeT
from megatron_eopt.base.place import whole_shape
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
        ConfigurationError: If the parameter is cut and the group is missing.
    """
    dim = cut_dimension(param)
    if dim == -1:
        return -1, None
    group = _group_of(param, pg_collection, "tp", mode)
    return (-1, None) if _size(group) == 1 else (dim, group)


def row_group(
    param: Tensor, pg_collection: Any, mode: TpModeT = "blockwise"
) -> dist.ProcessGroup | None:
    """Return the group over which weight rematerialization cuts the rows of a parameter, or None.

    Raises:
        ConfigurationError: If rows are cut and the group is missing.
    """
    if not getattr(param, "is_gtp_weight_remat", False):
        return None
    own: dist.ProcessGroup | None = getattr(param, "group", None)
    group = _group_of(param, pg_collection, "gtp_remat", mode) if own is None else own
    if not hasattr(param, "gtp_remat_size"):
        param.gtp_remat_size = _size(group)  # type: ignore[attr-defined]
    return None if _size(group) == 1 else group


def _group_of(
    param: Tensor, pg_collection: Any, kind: str, mode: TpModeT
) -> dist.ProcessGroup | None:
    is_expert = getattr(param, "expert_tp", False) or not getattr(param, "allreduce", True)
    name = f"expt_{kind}" if is_expert else kind
    group: dist.ProcessGroup | None = getattr(pg_collection, name, None)
    if group is None and mode != "blockwise":
        shape = tuple(param.shape)
        rule = f"must have the group {name!r}, because a parameter of shape {shape} is cut"
        hint = "Pass the model's process groups, or set partition_dim to -1 if nothing is cut"
        raise ConfigurationError("pg_collection", pg_collection, rule, hint)
    return group


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


class SlabRanks:
    """The ranks that store one parameter: tensor-parallel ranks, and pieces of their rows.

    Where both cut, the group of all of them is created once, by its members.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[Any, Any], tuple[Any, list[tuple[int, int]]]] = {}

    def of(
        self, tensor: dist.ProcessGroup | None, rows: dist.ProcessGroup | None
    ) -> tuple[Ranks, list[tuple[int, int]]]:
        """Return the ranks, and the tensor-parallel rank and piece of each; collective."""
        if _size(rows) == 1:
            ranks = Ranks.of(tensor)
            return ranks, [(rank, 0) for rank in range(ranks.size)]
        if _size(tensor) == 1:
            ranks = Ranks.of(rows)
            return ranks, [(0, piece) for piece in range(ranks.size)]
        if (tensor, rows) not in self._made:
            members = gather_objects(dist.get_process_group_ranks(tensor), rows)
            places = {
                rank: (number, piece)
                for piece, its in enumerate(members)
                for number, rank in enumerate(its)
            }
            group = group_of_members(sorted(places))
            self._made[tensor, rows] = group, [places[rank] for rank in sorted(places)]
        group, found = self._made[tensor, rows]
        return Ranks.of(group), found


def slab(
    name: str,
    param: Tensor,
    split_of: SplitOf,
    cut: tuple[int, dist.ProcessGroup | None],
    rows: dist.ProcessGroup | None = None,
    slab_ranks: SlabRanks | None = None,
) -> Shard:
    """Return the shard of a local parameter, cut as :func:`tensor_parallel_cut` returned.

    ``rows`` is its :func:`row_group`; ``slab_ranks`` keeps groups for several parameters.
    """
    dim, group = cut
    ranks, places = (slab_ranks or SlabRanks()).of(group, rows)
    size = _size(group)
    shape = list(whole_shape(param) if rows is not None else param.shape)
    if dim != -1:
        shape[dim - 2] *= size
    split = split_of(param, tuple(shape))
    held = param.numel()
    fragments = [Fragment(rank, 0, held) for rank, _ in places]
    if rows is not None:
        cuts = zip(fragments, places, strict=True)
        fragments = [fragment.of_rows(param, piece) for fragment, (_, piece) in cuts]
    layouts = fragment_layouts(split, dim, size, fragments)
    mine = fragments[ranks.rank]
    return Shard(
        name,
        split,
        layouts,
        ranks,
        tuple(param.shape),
        global_name=global_name(param, name),
        padding=held - (mine.stop - mine.start),
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
