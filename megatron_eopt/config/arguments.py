"""Builds every optimizer's constructor arguments from the configuration (see ``fields``)."""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_eopt.base.errors import ConfigurationError, naming
from megatron_eopt.base.names import STANDARD_OPTIMIZERS
from megatron_eopt.config.checks import check_arguments
from megatron_eopt.config.config import complete
from megatron_eopt.config.fields import constructor_parameters, set_arguments
from megatron_eopt.config.registry import arguments_cls_of, entry_of, prefixes_of
from megatron_eopt.config.settings import RunSettings

RATE_TO_COME = 1.0
"""Placeholder for a learning rate that is set later, because constructors need a number."""


def arguments_of(
    optimizers: Iterable[str],
    settings: RunSettings,
    model_chunks: Sequence[Any],
    pg_collection: Any,
) -> dict[str, dict[str, Any]]:
    """Return the constructor arguments of optimizers other than Adam and SGD, by their names."""
    found = {}
    for name in sorted(set(optimizers) - set(STANDARD_OPTIMIZERS)):
        kwargs = entry_kwargs(name, settings.config, model_chunks, pg_collection)
        found[name] = kwargs | ({"lr": RATE_TO_COME} if kwargs.get("lr", 0.0) is None else {})
    return found


def constructed(
    name: str,
    config: Any,
    kwargs: dict[str, Any],
    groups: Sequence[Any],
    *,
    for_shards: bool = False,
    is_resolved: bool = True,
    **own: Any,
) -> Any:
    """Construct the optimizer ``name`` over groups; errors name the configuration's fields.

    Args:
        name: Its name.
        config: The configuration.
        kwargs: The configuration's arguments.
        groups: Parameter groups.
        for_shards: Whether settings serve that make update rules, if the optimizer has such.
        is_resolved: Whether the values of the configuration have been checked.
        **own: Arguments that take the place of the configuration's.

    Raises:
        ConfigurationError: If no field gives an argument that is needed, or one is refused.
    """
    cls = arguments_cls_of(name) if for_shards else entry_of(name).optimizer_cls
    prefixes = prefixes_of(name)
    given = kwargs | own
    _, *arguments = inspect.signature(cls).parameters.values()
    for one in arguments:
        is_named = one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        if is_named and one.default is one.empty and one.name not in given:
            rule = f"is an argument of {cls.__name__} without a default, and no field sets it"
            hint = (
                "Give it a default, add the field to a subclass of EmergingOptimizerConfig, or "
                "pass config_to_kwargs to register_optimizer"
            )
            raise ConfigurationError(f"{prefixes[0]}_{one.name}", None, rule, hint)
    found = set_arguments(cls, prefixes, config)
    fields = {argument: field for argument, (field, _) in found.items() if argument not in own}
    of_fields = {n for n, its in found.items() if n in given and repr(its[1]) == repr(given[n])}
    checked = of_fields if is_resolved else set()
    if given.keys() - checked:
        all_given = {n: (fields.get(n, n), value) for n, value in given.items()}
        check_arguments(name, all_given, checked)
    with naming(fields):
        return cls(groups, **given)


def entry_kwargs(
    name: str, config: Any, model_chunks: Sequence[Any], pg_collection: Any
) -> dict[str, Any]:
    """Return the constructor arguments of the optimizer ``name`` for an ``OptimizerConfig``."""
    entry = entry_of(name)
    if entry.config_to_kwargs is not None:
        return entry.config_to_kwargs(config, model_chunks, pg_collection)
    return emerging_kwargs(arguments_cls_of(name), prefixes_of(name), config, pg_collection)


def emerging_kwargs(
    optimizer_cls: type, prefixes: Sequence[str], config: Any, pg_collection: Any = None
) -> dict[str, Any]:
    """Return the arguments of an optimizer that takes all of them from prefixed fields.

    Betas that no field sets are Adam's.
    """
    found = set_arguments(optimizer_cls, prefixes, config)
    kwargs = {argument: value for argument, (_, value) in found.items()}
    arguments = constructor_parameters(optimizer_cls)
    decoupled = getattr(config, "decoupled_weight_decay", True)
    if "use_decoupled_weight_decay" in arguments:
        kwargs["use_decoupled_weight_decay"] = decoupled
    elif "weight_decay_method" in arguments:
        # the optimizer's own field takes precedence
        kwargs.setdefault("weight_decay_method", "decoupled" if decoupled else "l2")
    elif not decoupled:
        rule = f"{prefixes[0]} supports decoupled weight decay only"
        raise ConfigurationError("decoupled_weight_decay", False, rule, "Set it to True")
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
    """Return the arguments of ``TensorParallelMuon``, or of a class with the same arguments."""
    config = complete(config)
    kwargs = emerging_kwargs(optimizer_cls, prefixes, config, pg_collection)
    model_config = getattr(model_chunks[0], "config", None)
    sizes = ("num_attention_heads", "num_query_groups", "kv_channels")
    has_attention = all(getattr(model_config, size, None) for size in sizes)
    kwargs["qkv_split_shapes"] = qkv_split_shapes(model_config) if has_attention else None
    return kwargs


def qkv_split_shapes(model_cfg: Any) -> list[int]:
    """Return the row counts of Q, the output gate if any, K and V in one query group."""
    head = model_cfg.kv_channels
    queries = model_cfg.num_attention_heads // model_cfg.num_query_groups * head
    gate = [queries] if getattr(model_cfg, "attention_output_gate", False) else []
    return [queries, *gate, head, head]


def scalar_arguments(name: str, settings: RunSettings) -> dict[str, Any]:
    """Return the arguments of Adam, SGD or Lion, except the kind of weight decay."""
    config = settings.config
    rate = RATE_TO_COME if config.lr is None else config.lr
    kwargs: dict[str, Any] = {"lr": rate, "weight_decay": config.weight_decay}
    match name:
        case "adam":
            # torch does not accept integers here
            kwargs["betas"] = (float(config.adam_beta1), float(config.adam_beta2))
            return kwargs | {"eps": float(config.adam_eps)}
        case "lion":
            return kwargs | {"betas": (config.lion_beta1, config.lion_beta2)}
        case _:
            return kwargs | {"momentum": config.sgd_momentum}
