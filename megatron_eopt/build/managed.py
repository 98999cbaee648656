"""What of Megatron-FSDP is not served, and why."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.upstream import needed
from megatron_eopt.settings.settings import Settings
from megatron_eopt.stores.megatron_fsdp import fsdp_modules
from megatron_eopt.stores.replicated import refuse_rematerialized

_OF_DDP = "DistributedDataParallelConfig."

_FLAGS = {
    "fp8_param_gather": "keeps weights of 8 bits, which are cut and rounded in ways of their own",
    "fp4_param_gather": "keeps weights of 4 bits, which are cut and rounded in ways of their own",
    "nccl_ub": "turns double buffering on",
    "fsdp_double_buffer": "has not been tried: it needs GPUs",
    "megatron_fsdp_cuda_graph_mode": "keeps gradients of a captured step, and the collectives that "
    "bring matrices together cannot be captured",
    "megatron_fsdp_use_decoupled_grad": "hands gradients to Transformer Engine's Adam alone",
}


def is_for_megatrons_own(settings: Settings, model_chunks: Sequence[Any]) -> bool:
    """Whether Adam or SGD is to run in a mode that megatron-core's own optimizer alone serves."""
    if not settings.is_standard:
        return False
    own = settings.precision_aware or settings.hybrid or settings.half == "fp16"
    modes = (error for m in fsdp_modules(model_chunks) for error in (*_flags(m), *_precision(m)))
    return own or any(modes)


def refuse_modes(modules: Iterable[Any]) -> None:
    """Raise for the first mode that is not served.

    Raises:
        ConfigurationError: With the reason, and the way out.
    """
    for module in modules:
        for error in (*_hybrid(module), *_flags(module), *_precision(module)):
            raise error


def refuse_unmanageable(settings: Settings, model_chunks: Sequence[Any]) -> None:
    """Raise for the first mode, or property of a model, that is not served.

    Raises:
        ConfigurationError: With the reason, and the way out.
    """
    refuse_modes(fsdp_modules(model_chunks))
    if len(model_chunks) > 1:
        rule = "must be one: Megatron-FSDP saves the first chunk of a pipeline stage alone"
        way_out = "Train without virtual pipeline stages"
        raise ConfigurationError("model_chunks", len(model_chunks), rule, way_out)
    if settings.storage != "sharded":
        rule = "must be on: Megatron-FSDP cuts weights and state"
        way_out = "Set use_distributed_optimizer=True"
        raise ConfigurationError("use_distributed_optimizer", False, rule, way_out)
    if settings.momentum_from_adam:
        rule = "is not read by Megatron-FSDP's checkpoints"
        way_out = "Leave it off, and let momentum start fresh (checkpoint_fresh_state)"
        raise ConfigurationError("checkpoint_momentum_from_adam", True, rule, way_out)
    if getattr(model_chunks[0].config, "qk_clip", False):
        rule = "scales rows of whole weights, which Megatron-FSDP cuts"
        raise ConfigurationError("qk_clip", True, rule, "Set qk_clip=False")
    for name, param in model_chunks[0].named_parameters():
        refuse_rematerialized(name, param.orig_param, None)


def refuse_tensor_parallelism(modules: Iterable[Any]) -> None:
    """Raise if tensor parallelism cuts a parameter of a plain model.

    Raises:
        ConfigurationError: If it does.
    """
    for module in modules:
        for name, shard in module.param_and_grad_buffer.optimizer_named_parameters:
            if shard.megatron_fsdp_dist_index.tp_dim in shard.device_mesh.mesh_dim_names:
                rule = "is cut by tensor parallelism, too, which of fused weights is not known how"
                way_out = "Use torch's fully_shard, or Megatron's own model"
                raise ConfigurationError(name, tuple(shard.placements), rule, way_out)


def _hybrid(module: Any) -> Iterator[ConfigurationError]:
    outer = module.ddp_config.outer_dp_sharding_strategy
    if outer != "no_shard":
        rule = (
            "cuts optimizer state over the outer data-parallel ranks, too, and megatron-core then "
            "does not divide gradients by the number of ranks"
        )
        way_out = "Set it to 'no_shard', which keeps a copy on each of the outer ranks"
        yield ConfigurationError(_OF_DDP + "outer_dp_sharding_strategy", outer, rule, way_out)


def _flags(module: Any) -> Iterator[ConfigurationError]:
    for name, rule in _FLAGS.items():
        if value := getattr(module.ddp_config, name, False):
            yield ConfigurationError(_OF_DDP + name, value, rule, f"Set {name}=False")


def _precision(module: Any) -> Iterator[ConfigurationError]:
    for name, shard in module.param_and_grad_buffer.optimizer_named_parameters:
        if not shard.requires_grad:
            continue
        if needed("is_float8tensor")(shard.orig_param):
            rule = "is stored in 8 bits, which are cut and rounded in ways of their own"
            yield ConfigurationError(name, "float8", rule, "Leave fp8_param_gather off")
        if shard.dtype != torch.float32:
            rule = "must be float32, or weights would be stepped in 16 bits"
            way_out = "Set it to torch.float32, its default"
            argument = _OF_DDP + "megatron_fsdp_main_params_dtype"
            yield ConfigurationError(argument, shard.dtype, rule, way_out)
