"""Optimizers of models in megatron-core's ``TorchFullyShardedDataParallel``.

One optimizer steps all of the model's DTensors. It sits in megatron-core's usual wrapper and chain,
so that gradients are prepared, clipped and counted as always.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.distributed import TorchFullyShardedDataParallel
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.assembly.chain import OneScaleChain
from megatron_eopt.assembly.children import plan_children
from megatron_eopt.assembly.meaning import Meaning
from megatron_eopt.assembly.plain.checkpoint import MAINS
from megatron_eopt.assembly.process_groups import OptimizerGroups
from megatron_eopt.assembly.routing import Routing
from megatron_eopt.assembly.tags import copy_tags
from megatron_eopt.assembly.wrappers import Float32Optimizer, MainParamsOptimizer
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.fsdp2.build import build_routed, check_supported
from megatron_eopt.fsdp2.model import check_parameters
from megatron_eopt.fsdp2.optimizer import ShardedOptimizer
from megatron_eopt.fsdp2.shards import shard_like
from megatron_eopt.storage.main_copies import main_copies

__all__ = ["ShardedChain", "assemble_sharded", "is_torch_fsdp2"]


def is_torch_fsdp2(model_chunks: Sequence[Any]) -> bool:
    """Whether torch's ``fully_shard`` manages the model, in megatron-core's wrapper."""
    return any(isinstance(chunk, TorchFullyShardedDataParallel) for chunk in model_chunks)


def assemble_sharded(
    config: Any,
    model_chunks: Sequence[Any],
    meaning: Meaning,
    routing: Routing,
    groups: OptimizerGroups,
) -> "ShardedChain":
    """Return the chain whose one optimizer steps all DTensors of the model; collective.

    Args:
        config: The configuration, checked.
        model_chunks: The wrapped model.
        meaning: What ``config`` means.
        routing: Which parameter gets which optimizer.
        groups: Megatron's process groups.

    Raises:
        ConfigurationError: If a field or a parameter cannot be honoured.
    """
    if meaning.storage != "replicated":
        rule = "cuts Megatron's buffers, and torch FSDP2 cuts state already"
        way_out = "Leave it off with --use-torch-fsdp2"
        raise ConfigurationError("use_distributed_optimizer", True, rule, way_out)
    mode = check_supported(config, meaning)
    parameters = [route.parameter for route in routing.routes]
    check_parameters(parameters)
    children = plan_children(routing.groups, meaning.optimizer, len(model_chunks))
    inner = build_routed(config, mode, parameters, children, routing.splits)
    wrapper: Any
    if config.bf16:
        wrapper = ShardedMainParams(inner, config, None, _state_exists)
        inner.follow(dict(main_copies(wrapper)))
    else:
        wrapper = ShardedFloat32(inner, config, _state_exists)
    copy_tags(wrapper)
    wrapper.grad_stats_parallel_group = groups.model
    wrapper.tp_group = groups.tensor
    wrapper.expert_tp_group = groups.expert_tensor
    return ShardedChain([wrapper], None, model_chunks)


class ShardedChain(OneScaleChain):
    """A chain over DTensors.

    Attributes:
        loads_itself: Tells the trainer's loader to hand a loaded state dict over: not all of it
            is in tensors that were read into.
    """

    loads_itself = True


class _ShardedCheckpoint:
    """Writes this rank's shards, and reads them back; stands before a wrapper in its bases."""

    optimizer: ShardedOptimizer

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Mapping[str, Any],
        is_loading: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return what ``dist_checkpointing`` saves or loads; collective.

        Raises:
            ConfigurationError: If ``torch_dist`` cannot hold a shard or some state.
        """
        owned = {
            param
            for part in self.optimizer.parts
            if part.owned is not None
            for param in part.params
        }
        for param, name in self.optimizer.names.items():
            _check_saveable(name, param, self.optimizer.state[param], param in owned)
        result: dict[str, Any] = super().sharded_state_dict(  # type: ignore[misc]
            model_sharded_state_dict, is_loading, metadata
        )
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` or ``dist_checkpointing`` returned; collective."""
        inner = dict(state_dict.get("optimizer", state_dict))
        members = [p for group in self.optimizer.param_groups for p in group["params"]]
        inner["state"] = {
            number: _shards(members[number], values) if isinstance(number, int) else values
            for number, values in inner["state"].items()
        }
        loaded = {**state_dict, "optimizer": inner} if "optimizer" in state_dict else inner
        if isinstance(main := loaded.get(MAINS), Mapping):
            present = getattr(self, "fp32_from_float16_groups", ())
            loaded[MAINS] = {
                number: {
                    place: _shard(present[number][place], value) for place, value in its.items()
                }
                for number, its in main.items()
            }
        super().load_state_dict(loaded)  # type: ignore[misc]


class ShardedFloat32(_ShardedCheckpoint, Float32Optimizer):
    """For float32: steps on the parameters' shards themselves."""


class ShardedMainParams(_ShardedCheckpoint, MainParamsOptimizer):
    """For bf16: steps on float32 copies of the shards."""


def _state_exists(*_: Any) -> None:
    """Do nothing: a ``ShardedOptimizer`` makes its state when it is built."""


def _shards(param: Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _shard(param, value) for key, value in values.items()}


def _shard(param: Tensor, value: Any) -> Any:
    """Return a loaded shard as the DTensor that it is a part of."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or not value.dim():
        return value
    return shard_like(param, value)


def _check_saveable(name: str, param: Tensor, state: Mapping[str, Any], at_owner: bool) -> None:
    if not isinstance(param, DTensor):
        return
    if uneven := [
        size
        for size, placement in zip(param.device_mesh.shape, param.placements, strict=True)
        if placement.is_shard() and param.shape[placement.dim] % size  # type: ignore[attr-defined]
    ]:
        rule = f"must divide by {uneven[0]}, since megatron-core writes shards of equal size"
        way_out = "Use sizes that divide, or train without --save"
        raise ConfigurationError(f"shape of {name}", tuple(param.shape), rule, way_out)
    whole = [
        key
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim() and not isinstance(value, DTensor)
    ]
    if whole or at_owner:
        rule = "is not cut like the weights, and torch_dist saves no other state under torch FSDP2"
        way_out = "Use muon, or adaptive_muon with adamuon; or pass --no-save-optim"
        raise ConfigurationError(f"state of {name}", whole or "whole matrices", rule, way_out)
