"""All that Megatron-FSDP has otherwise, under Megatron's trainer and by ``fully_shard_model``.

A model has its whole parameters in the forward and backward pass and DTensors of their shards, of
main weights where there are any, between the reduction of gradients and the next gather. The
DTensors lack attributes that say what a parameter is, so that routing looks at the whole ones, and
the DTensors take their places afterwards. One optimizer steps all of them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from megatron_eopt.base.agreement import agreed
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import GLOBAL_NAME_ATTRIBUTE
from megatron_eopt.base.upstream import found, needed
from megatron_eopt.build.builders import OF_DDP, Wanted, is_megatron_fsdp
from megatron_eopt.build.chain import OptimizerChain
from megatron_eopt.build.dtensors import build_routed, chain_over, state_exists
from megatron_eopt.checkpoint import fsdp_dtensor, optimizer_state
from megatron_eopt.optimizers.sharded import ShardedOptimizer
from megatron_eopt.storage.dtensors import LocalShards, local_of, shard_like
from megatron_eopt.storage.interface import Stored
from megatron_eopt.storage.replicated import Replicated

_OF_USERS = "eopt_"
"""How attributes begin that users set to say what a parameter is."""

# What would let an optimizer step without gradients, or with wrong ones, and nobody say so

_MODES = {
    "megatron_fsdp_cuda_graph_mode": "leaves gradients where zero_grad drops them",
    "megatron_fsdp_use_decoupled_grad": "hands gradients to Transformer Engine's Adam alone",
}


def faults(modules: Iterable[Any], *, own_loop: bool = False) -> Iterator[ConfigurationError]:
    """Yield an error, with the reason and the way out, for each mode that is not served."""
    for module in modules:
        for name, rule in _MODES.items():
            if value := getattr(module.ddp_config, name, False):
                yield ConfigurationError(OF_DDP + name, value, rule, f"Set {name}=False")
        outer = module.ddp_config.outer_dp_sharding_strategy
        if outer != "no_shard":
            rule = "does not divide gradients by the number of ranks in megatron-core"
            way_out = "Set it to 'no_shard', which keeps a copy on each of the outer ranks"
            yield ConfigurationError(OF_DDP + "outer_dp_sharding_strategy", outer, rule, way_out)
        for name, shard in module.param_and_grad_buffer.optimizer_named_parameters:
            if needed("is_float8tensor")(shard.orig_param):
                rule = "is stored in 8 bits, which are cut and rounded in ways of their own"
                yield ConfigurationError(name, "float8", rule, "Leave fp8_param_gather off")
            mesh = shard.device_mesh.mesh_dim_names
            if own_loop and shard.megatron_fsdp_dist_index.tp_dim in mesh:
                rule = "is cut by tensor parallelism, too, which of fused weights is not known how"
                way_out = "Use torch's fully_shard, or Megatron's own model"
                yield ConfigurationError(name, tuple(shard.placements), rule, way_out)


# The model


def fsdp_modules(model_chunks: Iterable[nn.Module]) -> list[Any]:
    """Return the modules that manage the parameters of a model's chunks, if any do."""
    managing = found("MegatronFSDP") or ()
    return [m for chunk in model_chunks for m in chunk.modules() if isinstance(m, managing)]


@contextmanager
def whole_parameters(model_chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Let a model have the parameters that it computes with, of which some may have no data."""
    cut = [module for module in fsdp_modules(model_chunks) if module.is_param_fsdp_distributed]
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


def _complete_gradients(params: Iterable[Tensor]) -> None:
    """Give empty shards, which Megatron-FSDP leaves without one, an empty gradient."""
    for param in params:
        local = local_of(param)
        if param.grad is None and not local.numel():
            param.grad = shard_like(param, local.detach())


def _compute_with_main_weights(model: Any) -> None:
    """Let a model compute with its main weights as something has loaded them; collective."""
    model.param_and_grad_buffer.copy_main_weights_to_model_weights()
    if model.ddp_config.data_parallel_sharding_strategy == "optim_grads_params":
        # what was gathered is forgotten, and each unit gathers its own in the forward pass
        model.synchronize_param_gather()
    else:
        model.start_param_sync(force_sync=True)


# In a training loop of one's own


class MegatronFSDPOptimizer(ShardedOptimizer):
    """Does by itself what ``fully_shard_optimizer`` makes other optimizers do."""

    def __init__(self, managing: Sequence[Any], *args: Any) -> None:
        self._managing = list(managing)  # the modules that manage the parameters
        super().__init__(*args)

    def clip_grad_norm(self, max_norm: float, **options: Any) -> Tensor:
        """Clip as torch's ``clip_grad_norm_`` would, which hangs on shards that are empty.

        Returns:
            The norm before, on all ranks.
        """
        self._collect_gradients()
        norm: Any = clip_grad_norm_(self.names, max_norm, **options)
        return norm.full_tensor()  # type: ignore[no-any-return]

    def _collect_gradients(self) -> None:
        for module in self._managing:
            # backward passes since the last time; what is reduced twice is wrong
            if module.microbatch_count:
                module.finish_grad_sync()
        _complete_gradients(self.names)

    def _step(self) -> None:
        """Wait for the gradients, step, and write the weights to the model."""
        self._collect_gradients()
        super()._step()
        for module in self._managing:
            module.install_optimized_model_weights()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, also where the model accumulates them."""
        super().zero_grad(set_to_none)
        for module in self._managing:
            module.zero_grad_buffer()

    def state_dict(self) -> dict[str, Any]:
        """Return groups and state, which torch's distributed checkpoint saves; collective."""
        prepared = needed("preprocess_state_dict_for_uneven_dtensor")
        state: dict[str, Any] = prepared(super().state_dict())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over groups and state, and let the model compute with its weights; collective.

        Raises:
            ConfigurationError: If state of a parameter is missing.
        """
        super().load_state_dict(state_dict)
        for module in self._managing:
            _compute_with_main_weights(module)


# In Megatron's


def chain_under_megatron_fsdp(wanted: Wanted) -> OptimizerChain | None:
    """Return the chain whose one optimizer steps all shards of the model; collective.

    Raises:
        ConfigurationError: If a field or a parameter cannot be honoured.
    """
    settings, model_chunks = wanted.settings, wanted.model_chunks
    if not is_megatron_fsdp(model_chunks):
        return None
    for error in faults(fsdp_modules(model_chunks)):
        raise error
    if len(model_chunks) > 1:
        rule = "must be one: Megatron-FSDP saves the first chunk of a pipeline stage alone"
        way_out = "Train without virtual pipeline stages"
        raise ConfigurationError("model_chunks", len(model_chunks), rule, way_out)
    inner = build_routed(settings, wanted.routing.over(shards_of_parameters(model_chunks)))
    storage = ManagedShards(inner, settings.config, model_chunks)
    storage.count_in(_stats_group(wanted), wanted.collection)
    return chain_over(storage, wanted, ManagedChain)


def _stats_group(wanted: Wanted) -> Any:
    """Return the ranks over which gradients, each on one of them, add up."""
    if wanted.model_chunks[0].ddp_config.data_parallel_sharding_strategy == "no_shard":
        return wanted.collection.mp
    groups = ProcessGroupCollection.setup_process_groups_for_optimizer(
        wanted.pg_collection, wanted.model_chunks, use_gloo_process_groups=False
    )
    return groups["intra_dist_opt_group"]


class ManagedShards(LocalShards, Replicated, DistributedOptimizer):
    """Steps the DTensors; megatron-core's wrapper writes them to the model and has it gather."""

    def __init__(self, optimizer: Any, config: Any, model_chunks: Sequence[Any]) -> None:
        super().__init__(
            optimizer,
            config,
            grad_scaler=None,
            init_state_fn=state_exists,
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
        _complete_gradients(self.get_parameters())

    def gradient_of(self, item: Stored) -> Tensor | None:
        """Return this rank's part of a gradient, as it is counted in the norm."""
        return None if item.main.grad is None else item.main.grad._local_tensor  # type: ignore[attr-defined]

    def gather_params(self, *, now: bool = False) -> None:
        """Bring the stepped weights to all ranks ``now``; otherwise each step begins with that."""
        for chunk in self.model_chunks if now else ():
            _compute_with_main_weights(chunk)

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Let the model compute with the main weights, which are what it has been loaded with."""
        self.gather_params(now=True)


class ManagedChain(OptimizerChain):
    """A chain over the shards that megatron-core's FSDP manages."""

    def sharded_state_dict(
        self, model_sharded_state_dict: Mapping[str, Any], is_loading: bool = False, **kwargs: Any
    ) -> Any:
        """Return what the trainer saves, or loads in place; collective.

        Raises:
            ConfigurationError: If the checkpoint is of another format than ``fsdp_dtensor``, or an
                owner keeps state that could not be restored.
        """
        metadata = kwargs.get("metadata") or {}
        form = kwargs.get("sharding_type") or metadata.get("distrib_optim_sharding_type")
        if form != fsdp_dtensor.FORMAT:
            rule = "does not hold what Megatron-FSDP stores"
            raise ConfigurationError("ckpt_format", form, rule, f"Use {fsdp_dtensor.FORMAT!r}")
        return fsdp_dtensor.requested(self.steppers[0], is_loading=is_loading)

    def load_state_dict(self, state_dict: Any) -> None:
        """Take over what was loaded into :meth:`sharded_state_dict`, or a state; collective."""
        if isinstance(state_dict, Mapping) and fsdp_dtensor.GROUPS in state_dict:
            agreed(lambda: fsdp_dtensor.load(self.steppers[0], state_dict))
            optimizer_state.settle(self.steppers)
        else:
            super().load_state_dict(state_dict)
        self.gather_params(now=True)
