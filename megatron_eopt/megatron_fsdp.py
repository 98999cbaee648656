"""Optimizers for your own training loop and a model that Megatron-FSDP shards."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from megatron_eopt.base.quiet import importing_quietly

with importing_quietly():
    from torch import nn

    from megatron_eopt.config.registry import Overrides
    from megatron_eopt.fsdp2.build import Framework, build_with
    from megatron_eopt.fsdp2.optimizer import DTensorOptimizer
    from megatron_eopt.routing.model import Routing
    from megatron_eopt.routing.outputs import OUTPUT_LAYERS
    from megatron_eopt.routing.places import ModelWalk
    from megatron_eopt.wrappers import megatron_fsdp

__all__ = ["build_optimizer"]


class _MegatronFSDP(Framework):
    """A model with modules that Megatron-FSDP's first version manages."""

    clip = "optimizer.clip_grad_norm"

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._managing = megatron_fsdp.fsdp_modules([model])
        self.optimizer_cls = partial(megatron_fsdp.MegatronFSDPOptimizer, self._managing)

    def check(self, walk: ModelWalk) -> None:
        """Raise an error for a mode that is not supported."""
        for error in megatron_fsdp.faults(self._managing, own_loop=True):
            raise error

    def whole_parameters(self) -> AbstractContextManager[None]:
        """In a block, let the model have its whole parameters."""
        return megatron_fsdp.whole_parameters([self._model])

    def over_shards(self, routing: Routing) -> Routing:
        """Return the routing of the DTensors."""
        return routing.over(megatron_fsdp.shards_of_parameters([self._model]))


def build_optimizer(
    model: nn.Module,
    config: Any,
    config_overrides: Overrides | None = None,
    *,
    output_layers: str | Sequence[str] = OUTPUT_LAYERS,
) -> DTensorOptimizer:
    """Build the optimizer of a model that ``fully_shard_model`` has sharded, or any other.

    It clips gradients by its ``clip_grad_norm``. Arguments, result and errors are otherwise those
    of :func:`megatron_eopt.fsdp2.build_optimizer`.
    """
    is_managed = isinstance(model, nn.Module) and bool(megatron_fsdp.fsdp_modules([model]))
    framework = _MegatronFSDP(model) if is_managed else Framework()
    return build_with(framework, model, config, config_overrides, output_layers)
