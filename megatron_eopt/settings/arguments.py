"""The constructor arguments of every optimizer, as a configuration's fields say.

The keyword contract, by which a field becomes an argument, is :mod:`megatron_eopt.settings.fields`.
"""

from collections.abc import Sequence
from typing import Any

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.settings.fields import constructor_arguments, kwargs_from_config
from megatron_eopt.settings.registry import entry_of, prefixes_of
from megatron_eopt.settings.settings import RunSettings

RATE_TO_COME = 1.0
"""Stands for a learning rate that is written later, since constructors ask for a number."""


def arguments_of(
    name: str, settings: RunSettings, model_chunks: Sequence[Any], pg_collection: Any
) -> dict[str, Any]:
    """Return the constructor arguments of the emerging optimizer ``name``."""
    kwargs = entry_kwargs(name, settings.config, model_chunks, pg_collection)
    return kwargs | ({"lr": RATE_TO_COME} if kwargs.get("lr", 0.0) is None else {})


def entry_kwargs(
    name: str, config: Any, model_chunks: Sequence[Any], pg_collection: Any
) -> dict[str, Any]:
    """Return the same for an ``OptimizerConfig``."""
    entry = entry_of(name)
    if entry.config_to_kwargs is not None:
        return entry.config_to_kwargs(config, model_chunks, pg_collection)
    return emerging_kwargs(entry.optimizer_cls, prefixes_of(name), config, pg_collection)


def emerging_kwargs(
    optimizer_cls: type, prefixes: Sequence[str], config: Any, pg_collection: Any = None
) -> dict[str, Any]:
    """Return the constructor arguments of an optimizer that follows the keyword contract alone.

    ``betas`` are Adam's where the optimizer has none of its own.
    """
    kwargs = kwargs_from_config(optimizer_cls, prefixes, config)
    arguments = constructor_arguments(optimizer_cls)
    decoupled = getattr(config, "decoupled_weight_decay", True)
    if "use_decoupled_weight_decay" in arguments:
        kwargs["use_decoupled_weight_decay"] = decoupled
    elif "weight_decay_method" in arguments:
        # a field of the optimizer's own goes before
        kwargs.setdefault("weight_decay_method", "decoupled" if decoupled else "l2")
    elif not decoupled:
        rule = f"{prefixes[0]} does not decay weights by way of gradients"
        raise ConfigurationError("decoupled_weight_decay", False, rule, "Leave it True")
    if "betas" in arguments:
        kwargs.setdefault("betas", (config.adam_beta1, config.adam_beta2))
    if "pg_collection" in arguments:
        kwargs["pg_collection"] = pg_collection
    return kwargs


def muon_family_kwargs(
    optimizer_cls: type,
    prefixes: Sequence[str],
    config: Any,
    model_chunks: Sequence[Any],
    pg_collection: Any,
) -> dict[str, Any]:
    """Return the constructor arguments of ``TensorParallelMuon``, or of a class with its arguments.

    The model's config has the sizes of fused QKV weights, if it has attention.
    """
    kwargs = emerging_kwargs(optimizer_cls, prefixes, config, pg_collection)
    kwargs["is_qkv_fn"] = lambda param: bool(getattr(param, "is_qkv", False))
    model_config = getattr(model_chunks[0], "config", None)
    sizes = ("num_attention_heads", "num_query_groups", "kv_channels")
    has_attention = all(getattr(model_config, size, None) for size in sizes)
    kwargs["qkv_split_shapes"] = qkv_split_shapes(model_config) if has_attention else None
    if "backend" not in kwargs:
        # A configuration of megatron-core's own class means megatron-core's iteration to the bit.
        kwargs["algorithm"] = "standard"
        if kwargs.get("tp_mode") != "distributed":
            kwargs["backend"] = "emerging_optimizers"
    return kwargs


def qkv_split_shapes(model_cfg: Any) -> list[int]:
    """Return the rows of Q, K and V in one query group of a fused QKV weight.

    With an output gate its rows come after the query's.
    """
    head = model_cfg.kv_channels
    queries = model_cfg.num_attention_heads // model_cfg.num_query_groups * head
    gate = [queries] if getattr(model_cfg, "attention_output_gate", False) else []
    return [queries, *gate, head, head]


def scalar_arguments(name: str, settings: RunSettings) -> dict[str, Any]:
    """Return the arguments of Adam, SGD or Lion, apart from how weight decay acts."""
    config = settings.config
    rate = RATE_TO_COME if config.lr is None else config.lr
    kwargs: dict[str, Any] = {"lr": rate, "weight_decay": config.weight_decay}
    match name:
        case "adam":
            # as floats: torch takes no integers among them
            kwargs["betas"] = (float(config.adam_beta1), float(config.adam_beta2))
            kwargs |= {"eps": float(config.adam_eps), "capturable": config.optimizer_cuda_graph}
            return kwargs
        case "lion":
            return kwargs | {"betas": (config.lion_beta1, config.lion_beta2)}
        case _:
            return kwargs | {"momentum": config.sgd_momentum}
