"""Megatron's distributed optimizer over fragments of its flat buffers."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_eopt.base.address import address_of
from megatron_eopt.base.names import MAIN_OF_SHARDED, STEP
from megatron_eopt.base.place import remat_size
from megatron_eopt.megatron_core.buckets import gather_buckets
from megatron_eopt.megatron_core.stored_weights import StoredWeights
from megatron_eopt.storage.shard import ParamShard
from megatron_eopt.wrappers.zero1.all_reduced import AllReducedBuffer


class Zero1Optimizer(StoredWeights, DistributedOptimizer):
    """Stores main weights and state of a buffer set in fragments, which a torch optimizer steps."""

    in_buffers = True
    main_kind = MAIN_OF_SHARDED
    copy = 0  # index of this rank's copy of parameters whose rows are not cut

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        # megatron-core can create only Adam's state; ours exists before it asks
        kwargs.setdefault("init_state_fn", lambda *_: None)
        self.params_of_groups = [list(group["params"]) for group in optimizer.param_groups]
        super().__init__(optimizer, *args, **kwargs)
        # :meth:`step_with_ready_grads` gathers parameters instead
        self._defer_param_sync = True
        # DDP's gradients with this rank's part of each, and main weights with the model's: views,
        # which are made again when what they show has moved
        self._gradients: dict[Tensor, tuple[Tensor, Any, Tensor]] = {}
        self._copies: tuple[list[Any], list[tuple[Tensor, Tensor]]] = [], []
        # whether the model's weights are fp8 or fp4
        self.is_quantized = self.ddp_config.fp8_param_gather or self.ddp_config.fp4_param_gather

    @classmethod
    def _build_optimizer_group_ranges(cls, param_groups: Any, gbuf_ranges: Any) -> Any:
        """Skip parameters of the buffers that are in no group; they may be another optimizer's."""
        # megatron-core looks up the group of every parameter of the buffers, and raises KeyError
        owned = {param for group in param_groups for param in group["params"]}
        for bucket in (b for by_dtype in gbuf_ranges for kind in by_dtype.values() for b in kind):
            param_map = bucket["param_map"]
            bucket["param_map"] = {param: param_map[param] for param in param_map if param in owned}
        base: Any = super()
        return base._build_optimizer_group_ranges(param_groups, gbuf_ranges)

    # for a chain, which gathers parameters once all its members have stepped
    step_in_chain = StoredWeights.step_with_ready_grads

    def step_with_ready_grads(self) -> bool:
        """Step, then gather parameters unless the forward pass does."""
        done = self.step_in_chain()
        for chunk in self.model_chunks:  # type: ignore[attr-defined]
            gather_buckets(chunk)
        self.gather_params()
        return done

    def state_dict(self) -> dict[str, Any]:
        """Return what all ranks have in common: groups, with the steps done, and loss scale."""
        groups = [
            {key: value for key, value in group.items() if key != "params"} | {STEP: self.steps}
            for group in self.optimizer.param_groups
        ]
        state: dict[str, Any] = {"optimizer": {"param_groups": groups}}
        if self.grad_scaler:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    def common_state(self, steps: Sequence[int], main_optimizer: str | None) -> dict[str, Any]:
        """Return what reshardable checkpoints store once for all ranks."""
        state = self.state_dict()
        for group, count in zip(state["optimizer"]["param_groups"], steps, strict=True):
            group[STEP] = count if count >= 0 else self.steps
            if group.get("optimizer") == main_optimizer:
                del group["optimizer"]
        return {**state, "param_state_sharding_type": "fully_reshardable"}

    def mains(self) -> dict[Tensor, Tensor | None]:
        """Return this rank's fragment of each parameter; None where it has none."""
        mains: dict[Tensor, Tensor | None] = {
            p: None for params in self.params_of_groups for p in params
        }
        groups = zip(
            (*self.model_fp32_groups, *self.model_float16_groups),
            (*self.shard_fp32_groups, *self.shard_fp32_from_float16_groups),
            strict=True,
        )
        return mains | {param: main for pair in groups for param, main in zip(*pair, strict=True)}

    def set_stepped(self, shards: Iterable[ParamShard]) -> list[ParamShard]:
        """Set the fragments that are stepped, and where they begin."""
        stored = super().set_stepped(shards)
        for shard in stored:
            shard.start = self._get_model_param_range_map(shard.param)["param"].start
        return stored

    def replica_of(self, param: Tensor, replica: Any) -> tuple[int, ...]:
        """Return the replica id: copies of a fragment are in other optimizer instances.

        With weight rematerialization there is one instance, and the ranks over which it cuts other
        parameters have copies of this one.
        """
        copy = self.copy if remat_size(param) == 1 else 0
        return (*replica[:-1], self.distributed_optimizer_instance_id + copy)

    def replica_of_matrix(self, param: Tensor, replica: Any) -> tuple[int, ...]:
        """Return the replica id, the same on all ranks of one instance."""
        return (0, 0, self.distributed_optimizer_instance_id)

    def gather_params(self, *, now: bool = False) -> None:
        """Gather parameters if DDP does not, because it all-reduces gradients."""
        for buffer in self.buffers:
            if isinstance(buffer, AllReducedBuffer) and (now or not buffer.gathered_by_hooks):
                buffer.gather()

    @torch.no_grad()
    def collect_gradients(self, shards: Iterable[ParamShard] | None = None) -> None:
        """Hand this step's gradients to the stepped tensors, all or those of some shards."""
        with ExitStack() as stack:
            for item in self.assigned:
                if (host := item.rule.host) is not None:
                    # torch refuses a gradient on another device than its tensor
                    stack.enter_context(host.stood_in_for())
            for shard in self.shards if shards is None else shards:
                param, main = shard.param, shard.main
                grad: Any = getattr(param, "main_grad", None)
                if grad is None or not grad.is_contiguous():
                    # without DDP, torch's own attribute has the gradient
                    grad = param.grad if grad is None else grad
                    main.grad = None if grad is None else shard.held_of(grad).float()
                    continue
                cached = self._gradients.get(param)
                if cached is None or cached[0] is not grad or cached[1] != address_of(grad):
                    cached = (grad, address_of(grad), shard.held_of(grad))
                    self._gradients[param] = cached
                main.grad = cached[2].float()

    # megatron-core's wrapper calls it by this name, if a member of a chain steps alone
    _copy_model_grads_to_main_grads = collect_gradients

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Return main weights with the model's; none if the model's are fp8 or fp4."""
        if self.is_quantized:
            return []
        buckets = [bucket.param_data for buffer in self.buffers for bucket in buffer.buckets]
        # a float32 parameter is its own main weight, unless a caller has moved one of them
        own = [main for group in self.shard_fp32_groups for main in group]
        now = [address_of(tensor) for tensor in (*buckets, *own) if tensor is not None]
        before, pairs = self._copies
        if now != before:
            views = [(shard.main, self._param_view(shard.param)) for shard in self.shards]
            pairs = [(main, view) for main, view in views if address_of(view) != address_of(main)]
            self._copies = now, pairs
        return pairs

    def _copy_main_params_to_model_params(self) -> None:
        if self.is_quantized:
            super()._copy_main_params_to_model_params()
        else:
            self.copy_mains()

    def _stage_model_params_from_main_params(self) -> None:
        if self.ddp_config.reuse_grad_buf_for_mxfp8_param_ag:
            # MXFP8 weights are no views of the buckets, so megatron-core has another method for
            # them
            self._copy_main_params_to_param_buffer()
        else:
            super()._stage_model_params_from_main_params()

    def _param_view(self, param: Tensor) -> Tensor:
        own_range = self._get_model_param_range_map(param)["gbuf_world_in_bucket"]
        buffer, _, bucket = self.model_param_gbuf_map[param]
        # from the bucket, not from the parameter: the all-gather sends this range of the bucket
        data: Tensor = self.buffers[buffer].buckets[bucket].param_data
        return data.view(-1)[own_range.start : own_range.end]
