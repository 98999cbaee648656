"""Support for Megatron-FSDP, under Megatron's trainer and with ``fully_shard_model``.

The modules have whole parameters in the forward and backward pass. From the reduction of gradients
to the next gather, they have DTensor shards, of main weights if there are any. The DTensors lack
the attributes that routing needs. So the whole parameters are routed, then replaced by the
DTensors, which one optimizer steps.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import GLOBAL_NAME_ATTRIBUTE, Int64Array
from megatron_eopt.checkpoint import fsdp_dtensor, optimizer_state
from megatron_eopt.fsdp2.dtensors import build_dtensors
from megatron_eopt.fsdp2.optimizer import DTensorOptimizer
from megatron_eopt.layouts import Layout
from megatron_eopt.matrices import Split
from megatron_eopt.megatron_core.upstream import find_upstream, require_upstream
from megatron_eopt.state.groups import BY_PARAMETER
from megatron_eopt.storage.local_tensors import local_of, shard_like
from megatron_eopt.storage.shard import Fragment, fragment_layouts
from megatron_eopt.storage.uneven import UnevenKind, register_uneven
from megatron_eopt.wrappers.builders import OF_DDP, OptimizerBuildContext, is_megatron_fsdp
from megatron_eopt.wrappers.chain import OptimizerChain
from megatron_eopt.wrappers.replicated import Replicated, state_exists
from megatron_eopt.wrappers.torch_fsdp2 import LocalShards, chain_over

_OF_USERS = "eopt_"
"""Prefix of the attributes that users set on parameters."""

# with these, an optimizer would silently step without gradients, or with wrong ones
_MODES = {
    "megatron_fsdp_cuda_graph_mode": "leaves gradients where zero_grad clears them",
    "megatron_fsdp_use_decoupled_grad": "passes gradients to Transformer Engine's Adam only",
}


class InBuckets(UnevenKind):
    """DTensors of Megatron-FSDP's first version.

    Each rank has any number of rows of a tensor-parallel shard. In a fused weight such a shard has
    a part of every logical matrix, so what a rank holds is a flat fragment of it, as in Megatron's
    buffers, not a box of the whole weight.
    """

    asks_sizes = hides_gradients = True

    def holds(self, param: DTensor) -> bool:
        """Return whether this version has cut a parameter."""
        return hasattr(param, "megatron_fsdp_dist_index")

    def part_of(self, param: DTensor, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor, cut like ``param``."""
        # without this attribute, each rank has the whole parameter
        own_slice = getattr(param, "megatron_fsdp_slice", slice(None))
        return whole.reshape(-1)[own_slice].view(local_of(param).shape)

    def layouts(
        self, name: str, param: DTensor, split: Split, mesh: Int64Array, sizes: Int64Array
    ) -> tuple[Layout, ...]:
        """Return the layouts of a parameter's logical matrices."""
        index = param.megatron_fsdp_dist_index  # type: ignore[attr-defined]
        dims = list(param.device_mesh.mesh_dim_names or ())
        # along this dimension, ranks have consecutive ranges; all others have copies or other slabs
        of_data, stops = dims.index(index.dp_shard_dim), sizes[mesh]
        starts = np.zeros_like(stops)
        if not param.placements[of_data].is_replicate():
            stops = np.cumsum(stops, axis=of_data)
            starts = stops - sizes[mesh]
        slabs, cut, size = np.zeros_like(mesh), -1, 1
        if index.tp_dim in dims:
            of_tensor = dims.index(index.tp_dim)
            slabs, size = np.indices(mesh.shape)[of_tensor], mesh.shape[of_tensor]
            cut = param.placements[of_tensor].dim  # type: ignore[attr-defined]
        # fragments are listed by rank in the group, but the mesh may have another order
        order = np.argsort(mesh.ravel())
        table = np.stack([slabs.ravel(), starts.ravel(), stops.ravel()], axis=1)[order]
        return fragment_layouts(split, cut, size, [Fragment(*row) for row in table.tolist()])


register_uneven(InBuckets())


def faults(modules: Iterable[Any], *, own_loop: bool = False) -> Iterator[ConfigurationError]:
    """Yield an error for each mode of Megatron-FSDP that is not supported."""
    for module in modules:
        for name, rule in _MODES.items():
            if value := getattr(module.ddp_config, name, False):
                yield ConfigurationError(OF_DDP + name, value, rule, f"Set {name}=False")
        outer = module.ddp_config.outer_dp_sharding_strategy
        if outer != "no_shard":
            rule = "does not divide gradients by the number of ranks in megatron-core"
            hint = "Set it to 'no_shard', which keeps a copy on each outer rank"
            yield ConfigurationError(OF_DDP + "outer_dp_sharding_strategy", outer, rule, hint)
        for name, shard in module.param_and_grad_buffer.optimizer_named_parameters:
            if require_upstream("is_float8tensor")(shard.orig_param):
                rule = "is stored in 8 bits, which is not supported with Megatron-FSDP"
                yield ConfigurationError(name, "float8", rule, "Set fp8_param_gather=False")
            mesh = shard.device_mesh.mesh_dim_names
            if own_loop and shard.megatron_fsdp_dist_index.tp_dim in mesh:
                rule = "is also cut by tensor parallelism, in an unknown way for fused weights"
                hint = "Use torch's fully_shard, or Megatron's trainer"
                yield ConfigurationError(name, tuple(shard.placements), rule, hint)


def fsdp_modules(model_chunks: Iterable[nn.Module]) -> list[Any]:
    """Return the ``MegatronFSDP`` modules of a model."""
    managing = find_upstream("MegatronFSDP") or ()
    return [m for chunk in model_chunks for m in chunk.modules() if isinstance(m, managing)]


@contextmanager
def whole_parameters(model_chunks: Iterable[nn.Module]) -> Iterator[None]:
    """In a block, let a model have its whole parameters; some may have no data."""
    cut = [module for module in fsdp_modules(model_chunks) if module.is_param_fsdp_distributed]
    for module in cut:
        for _, shard in module.param_and_grad_buffer.optimizer_named_parameters:
            of_users = {k: v for k, v in vars(shard).items() if k.startswith(_OF_USERS)}
            vars(shard.orig_param).update(of_users)
        # the whole parameters have the attributes of Megatron's layers, the DTensors have not
        module._replace_param_with_raw_if_needed()
    try:
        yield
    finally:
        for module in cut:
            module._replace_param_with_distributed_if_needed()


def shards_of_parameters(model_chunks: Iterable[nn.Module]) -> dict[Tensor, nn.Parameter]:
    """Return the DTensor to step for each whole parameter."""
    shards = {
        shard.orig_param: shard
        for module in fsdp_modules(model_chunks)
        for _, shard in module.param_and_grad_buffer.optimizer_named_parameters
    }
    # how gradients are counted in norms, and the global name
    copied = ("allreduce", require_upstream("GRAD_NORM_GROUP_ATTR"), GLOBAL_NAME_ATTRIBUTE)
    for param, shard in shards.items():
        vars(shard).update({k: v for k, v in vars(param).items() if k in copied})
    return shards


def _complete_gradients(params: Iterable[Tensor]) -> None:
    """Give empty shards an empty gradient, which Megatron-FSDP does not set."""
    for param in params:
        local = local_of(param)
        # without a gradient it would not be stepped, and ranks would disagree about that
        if param.grad is None and not local.numel():
            param.grad = shard_like(param, local.detach())


def _compute_with_main_weights(model: Any) -> None:
    """Copy loaded main weights to the weights that the model computes with; collective."""
    model.param_and_grad_buffer.copy_main_weights_to_model_weights()
    strategy = model.ddp_config.data_parallel_sharding_strategy
    if strategy == "optim_grads_params":
        # releases gathered weights, so that each unit gathers again in the forward pass
        model.synchronize_param_gather()
    elif strategy != "no_shard":
        # without shards, this would only replace the DTensors, by which state is saved
        model.start_param_sync(force_sync=True)


# Your own training loop


class UnevenOptimizer(DTensorOptimizer):
    """Saves and loads state that Megatron-FSDP cuts otherwise than torch; for either version."""

    def compute_with_main_weights(self) -> None:
        """Copy main weights to the weights that the model computes with; collective."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return groups and state for torch's distributed checkpoints; collective."""
        prepared = require_upstream("preprocess_state_dict_for_uneven_dtensor")
        state: dict[str, Any] = prepared(super().state_dict())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and state, and update the weights that the model computes with; collective.

        Raises:
            ConfigurationError: If state of a parameter is missing.
        """
        super().load_state_dict(state_dict)
        self.compute_with_main_weights()


class MegatronFSDPOptimizer(UnevenOptimizer):
    """Steps a ``MegatronFSDP`` model; do not pass it to ``fully_shard_optimizer``."""

    def __init__(self, managing: Sequence[Any], *args: Any) -> None:
        self._managing = list(managing)  # the modules that manage the parameters
        super().__init__(*args)

    def clip_grad_norm(self, max_norm: float, **options: Any) -> Tensor:
        """Clip gradients; replaces torch's ``clip_grad_norm_``, which hangs on empty shards.

        Returns:
            The norm before clipping, of shape (), the same on all ranks.
        """
        self._collect_gradients()
        norm: Any = clip_grad_norm_(self.names, max_norm, **options)
        return norm.full_tensor()  # type: ignore[no-any-return]

    def _collect_gradients(self) -> None:
        for module in self._managing:
            # only after new backward passes, since a second reduction would be wrong
            if module.microbatch_count:
                module.finish_grad_sync()
        _complete_gradients(self.names)

    def _step(self) -> None:
        """Wait for gradients, step, and write the weights to the model."""
        self._collect_gradients()
        super()._step()
        for module in self._managing:
            module.install_optimized_model_weights()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and the model's gradient buffers."""
        super().zero_grad(set_to_none)
        for module in self._managing:
            module.zero_grad_buffer()

    def compute_with_main_weights(self) -> None:
        """Copy main weights to the weights that the model computes with; collective."""
        for module in self._managing:
            _compute_with_main_weights(module)


# Megatron's training loop


def build_megatron_fsdp(context: OptimizerBuildContext) -> OptimizerChain | None:
    """Return the chain for a Megatron-FSDP model; one optimizer steps all shards; collective."""
    settings, model_chunks = context.settings, context.model_chunks
    if not is_megatron_fsdp(model_chunks):
        return None
    for error in faults(fsdp_modules(model_chunks)):
        raise error
    if len(model_chunks) > 1:
        rule = "must be one, because Megatron-FSDP saves only the first chunk of a pipeline stage"
        hint = "Train without virtual pipeline stages"
        raise ConfigurationError("model_chunks", len(model_chunks), rule, hint)
    inner = build_dtensors(settings, context.routing.over(shards_of_parameters(model_chunks)))
    storage = MegatronFSDPShards(inner, settings.config, model_chunks)
    storage.count_in(_stats_group(context), context.collection)
    return chain_over(storage, context, MegatronFSDPChain)


def _stats_group(context: OptimizerBuildContext) -> Any:
    """Return the group over whose ranks gradient statistics are summed."""
    # every data-parallel rank then has the whole gradient
    if context.model_chunks[0].ddp_config.data_parallel_sharding_strategy == "no_shard":
        return context.collection.mp
    groups = ProcessGroupCollection.setup_process_groups_for_optimizer(
        context.pg_collection, context.model_chunks, use_gloo_process_groups=False
    )
    return groups["intra_dist_opt_group"]


class MegatronFSDPShards(LocalShards, Replicated, DistributedOptimizer):
    """Steps the DTensors; megatron-core's wrapper writes them to the model, which gathers them."""

    def __init__(self, optimizer: Any, config: Any, model_chunks: Sequence[Any]) -> None:
        super().__init__(
            optimizer,
            config,
            grad_scaler=None,
            init_state_fn=state_exists,
            model_chunks=list(model_chunks),
            # with Megatron-FSDP, the constructor returns before it reads buffers and groups
            per_model_buffers={},
            data_parallel_group=None,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=0,
            distributed_optimizer_instance_id=0,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return groups and state in torch's form; collective."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def collect_gradients(self) -> None:
        """Add empty gradients; the model sets all others when it reduces them."""
        _complete_gradients(self.get_parameters())

    def gather_params(self, *, now: bool = False) -> None:
        """With ``now``, gather the stepped weights to all ranks; otherwise each step does so."""
        for chunk in self.model_chunks if now else ():
            _compute_with_main_weights(chunk)

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Copy the main weights, into which the model was loaded, to the model's weights."""
        self.gather_params(now=True)


class MegatronFSDPChain(OptimizerChain):
    """A chain over the shards that megatron-core's FSDP manages."""

    def sharded_state_dict(
        self, model_sharded_state_dict: Mapping[str, Any], is_loading: bool = False, **kwargs: Any
    ) -> Any:
        """Return what the trainer saves, or loads in place; collective.

        Raises:
            ConfigurationError: If the checkpoint format is not ``fsdp_dtensor``, or state cannot be
                saved in it.
        """
        metadata = kwargs.get("metadata") or {}
        form = kwargs.get("sharding_type") or metadata.get("distrib_optim_sharding_type")
        if form != fsdp_dtensor.FORMAT:
            rule = "is not supported with Megatron-FSDP"
            raise ConfigurationError("ckpt_format", form, rule, f"Use {fsdp_dtensor.FORMAT!r}")
        return fsdp_dtensor.requested(self.chained_optimizers[0], is_loading=is_loading)

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what was read into :meth:`sharded_state_dict`, or a state dict; collective."""
        if isinstance(state_dict, Mapping) and BY_PARAMETER in state_dict:
            fsdp_dtensor.load(self.chained_optimizers[0], state_dict)
            optimizer_state.pack_loaded(self.chained_optimizers)
        else:
            super().load_state_dict(state_dict)
        self.gather_params(now=True)
