"""Weights in megatron-core's FSDP: DTensors of its buffers, which it reduces to and gathers from.

The model has its whole parameters in the forward and backward pass and DTensors of their shards, of
main weights where there are any, between the reduction of gradients and the next gather. The
DTensors lack attributes that say what a parameter is; ``orig_param`` has them.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from megatron_eopt.base.names import GLOBAL_NAME_ATTRIBUTE
from megatron_eopt.base.upstream import found, needed
from megatron_eopt.stores.dtensors import LocalShards, local_of, shard_like
from megatron_eopt.stores.interface import Stored
from megatron_eopt.stores.replicated import Replicated

_OF_USERS = "eopt_"
"""How attributes begin that users set to say what a parameter is."""


def fsdp_modules(model_chunks: Iterable[nn.Module]) -> list[Any]:
    """Return the modules that manage the parameters of a model's chunks, if any do."""
    managing = found("MegatronFSDP") or ()
    return [m for chunk in model_chunks for m in chunk.modules() if isinstance(m, managing)]


@contextmanager
def whole_parameters(model_chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Let a model have the parameters that it computes with, of which some may have no data."""
    modules = fsdp_modules(model_chunks)
    cut = [module for module in modules if module.is_param_fsdp_distributed]
    for module in cut:
        for _, shard in module.param_and_grad_buffer.optimizer_named_parameters:
            of_users = {k: v for k, v in vars(shard).items() if k.startswith(_OF_USERS)}
            vars(shard.orig_param).update(of_users)
        module._replace_param_with_raw_if_needed()
    try:
        yield
    finally:
        for module in cut:
            module._replace_param_with_distributed_if_needed()


def shards_of_parameters(model_chunks: Iterable[nn.Module]) -> dict[Tensor, nn.Parameter]:
    """Return the DTensor that is stepped for each parameter that a model computes with."""
    shards = {
        shard.orig_param: shard
        for module in fsdp_modules(model_chunks)
        for _, shard in module.param_and_grad_buffer.optimizer_named_parameters
    }
    # what says where gradients are counted, and what it is in the whole model
    told = ("allreduce", needed("GRAD_NORM_GROUP_ATTR"), GLOBAL_NAME_ATTRIBUTE)
    for param, shard in shards.items():
        vars(shard).update({k: v for k, v in vars(param).items() if k in told})
    return shards


def complete_gradients(params: Iterable[Tensor]) -> None:
    """Give empty shards, which Megatron-FSDP leaves without one, an empty gradient."""
    for param in params:
        local = local_of(param)
        if param.grad is None and not local.numel():
            param.grad = shard_like(param, local.detach())


def compute_with_main_weights(model: Any) -> None:
    """Let a model compute with its main weights as something has loaded them; collective."""
    model.param_and_grad_buffer.copy_main_weights_to_model_weights()
    if model.ddp_config.data_parallel_sharding_strategy == "optim_grads_params":
        # what was gathered is forgotten, and each unit gathers its own in the forward pass
        model.synchronize_param_gather()
    else:
        model.start_param_sync(force_sync=True)


class ManagedShards(LocalShards, Replicated, DistributedOptimizer):
    """Steps the DTensors; megatron-core's wrapper writes them to the model and has it gather.

    Args:
        optimizer: A torch optimizer of DTensors, whose state exists.
        config: Megatron's configuration.
        model_chunks: The wrapped model.
    """

    def __init__(self, optimizer: Any, config: Any, model_chunks: Sequence[Any]) -> None:
        super().__init__(
            optimizer,
            config,
            grad_scaler=None,
            init_state_fn=lambda *_: None,
            model_chunks=list(model_chunks),
            per_model_buffers={},
            data_parallel_group=None,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=0,
            distributed_optimizer_instance_id=0,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return groups and state as torch has them; collective."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def collect_gradients(self) -> None:
        """Complete the gradients, which the model has handed over when it reduced them."""
        complete_gradients(self.get_parameters())

    def gradient_of(self, item: Stored) -> Tensor | None:
        """Return this rank's part of a gradient, as it is counted in the norm."""
        return None if item.main.grad is None else item.main.grad._local_tensor  # type: ignore[attr-defined]

    def gather_params(self, *, now: bool = False) -> None:
        """Bring the stepped weights to all ranks ``now``; otherwise each step begins with that."""
        for chunk in self.model_chunks if now else ():
            compute_with_main_weights(chunk)

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Let the model compute with the main weights, which are what it has been loaded with."""
        self.gather_params(now=True)
