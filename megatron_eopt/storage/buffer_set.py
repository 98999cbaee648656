"""Megatron's distributed optimizer for one set of buffers, around a composite."""

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_eopt.storage.checkpoint import CheckpointMixin
from megatron_eopt.storage.composite import CompositeOptimizer
from megatron_eopt.storage.replicated import ReplicatedBuffer

__all__ = ["BufferSetOptimizer"]


class BufferSetOptimizer(CheckpointMixin, DistributedOptimizer):
    """Keeps main weights and state of one buffer set in fragments; the composite steps them.

    The chain that holds this optimizer gathers parameters and handles the loss scale, once for all
    its members. Arguments are those of ``DistributedOptimizer``, with a composite as the optimizer.
    """

    optimizer: CompositeOptimizer

    def __init__(
        self, optimizer: CompositeOptimizer, config: Any, grad_scaler: Any, **kwargs: Any
    ) -> None:
        super().__init__(optimizer, config, grad_scaler, lambda *_: None, **kwargs)
        # the chain gathers parameters when all its members have stepped
        self._defer_param_sync = True
        self.main_of = self._main_of()
        self._prepare_copies()
        optimizer.attach(self.main_of)
        optimizer.refresh()
        optimizer.init_state()

    def _main_of(self) -> dict[Tensor, Tensor]:
        pairs = [
            *zip(self.model_fp32_groups, self.shard_fp32_groups, strict=True),
            *zip(self.model_float16_groups, self.shard_fp32_from_float16_groups, strict=True),
        ]
        return {
            param: main
            for params, mains in pairs
            for param, main in zip(params, mains, strict=True)
        }

    def _prepare_copies(self) -> None:
        """Cut all views once: a step then costs one fused call, not three calls a parameter."""
        self._mains = list(self.main_of.values())
        self._grad_views = [self._grad_view(param) for param in self.main_of]
        self._sizes = [view.numel() for view in self._grad_views]
        self._grads_are_float32 = all(view.dtype == torch.float32 for view in self._grad_views)
        self._quantized = self.ddp_config.fp8_param_gather or self.ddp_config.fp4_param_gather
        if self._quantized:
            return
        self._moved_mains, self._param_views = [], []
        for param, main in self.main_of.items():
            view = self._param_view(param)
            # the main copy of a float32 parameter is the parameter itself
            if view.data_ptr() != main.data_ptr():
                self._moved_mains.append(main)
                self._param_views.append(view)

    def _grad_view(self, param: Any) -> Tensor:
        held = self._get_model_param_range_map(param)["param"]
        grad: Tensor = param.main_grad
        return grad.detach().view(-1)[held.start : held.end]

    def _param_view(self, param: Tensor) -> Tensor:
        held = self._get_model_param_range_map(param)["gbuf_world_in_bucket"]
        buffer, _, bucket = self.model_param_gbuf_map[param]
        data: Tensor = self.buffers[buffer].buckets[bucket].param_data
        return data.view(-1)[held.start : held.end]

    @torch.no_grad()
    def _copy_model_grads_to_main_grads(self) -> None:
        grads = self._grad_views
        if not self._grads_are_float32:
            flat = torch.empty(
                sum(self._sizes), dtype=torch.float32, device=torch.cuda.current_device()
            )
            grads = list(torch.split(flat, self._sizes))
            torch._foreach_copy_(grads, self._grad_views)
        for main, grad in zip(self._mains, grads, strict=True):
            main.grad = grad

    @torch.no_grad()
    def _copy_main_params_to_model_params(self) -> None:
        if self._quantized:
            super()._copy_main_params_to_model_params()
        elif self._param_views:
            torch._foreach_copy_(self._param_views, self._moved_mains)

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step the composite and write the model's parameters of this rank's fragments."""
        done = bool(super().step_with_ready_grads())
        self.steps += done
        return done

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        super()._copy_model_params_to_main_params(state_dict=state_dict)
        self.optimizer.refresh()

    def gather_replicated_params(self) -> None:
        """Collect parameters that DDP does not gather itself, since it all-reduces gradients."""
        for buffer in self.buffers:
            if isinstance(buffer, ReplicatedBuffer):
                buffer.gather_params()
