"""Megatron's distributed optimizer for one set of buffers, around a composite."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_eopt.storage.checkpoint.mixin import CheckpointMixin
from megatron_eopt.storage.checkpoint.owned import OwnedMatrix
from megatron_eopt.storage.composite import CompositeOptimizer
from megatron_eopt.storage.non_finite import WatchedGradients
from megatron_eopt.storage.replicated import ReplicatedBuffer

__all__ = ["BufferSetOptimizer"]


class BufferSetOptimizer(CheckpointMixin, WatchedGradients, DistributedOptimizer):
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
        pairs = [(main, self._param_view(param)) for param, main in self.main_of.items()]
        self._copies = [pair for pair in pairs if _lie_apart(*pair)]
        # the main copy of a float32 parameter is the parameter itself, until a caller has moved it
        # to another device and back
        self._shared = [pair for pair in pairs if not _lie_apart(*pair)]

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
            return
        copies = self._copies + [pair for pair in self._shared if _lie_apart(*pair)]
        if copies:
            mains, views = zip(*copies, strict=True)
            torch._foreach_copy_(views, mains)

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        super()._copy_model_params_to_main_params(state_dict=state_dict)
        self.optimizer.refresh()

    def owned_matrices(self) -> Iterator[OwnedMatrix]:
        """Yield the whole matrices that this rank owns, with their state."""
        for part in self.optimizer.parts:
            yield from part.owned_matrices()

    def make_state_exist(self) -> None:
        """Let every fragment and matrix have the state that it is about to load."""
        self.optimizer.expect_state()

    def _set_steps(self, steps: int) -> None:
        self.optimizer.set_steps(steps)

    def _after_loading(self) -> None:
        self.optimizer.refresh()

    def gather_replicated_params(self) -> None:
        """Collect parameters that DDP does not gather itself, since it all-reduces gradients."""
        for buffer in self.buffers:
            if isinstance(buffer, ReplicatedBuffer):
                buffer.gather_params()


def _lie_apart(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() != other.data_ptr()
