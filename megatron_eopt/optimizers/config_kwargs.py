"""The keyword contract: how constructor arguments follow from a configuration's fields.

For a constructor argument ``x`` the fields ``<own prefix>_x``, ``<parent's prefix>_x`` and ``x``
are looked up in this order. A field with a prefix in use that was changed and that nobody takes is
an error, since its user expects an effect.
"""

import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import OLD_SPELLINGS

_MISSING: Any = object()


def constructor_arguments(optimizer_cls: type) -> list[str]:
    """Return the names of a class's constructor arguments, following ``**kwargs`` to its bases."""
    names: dict[str, None] = {}
    for cls in optimizer_cls.__mro__:
        if "__init__" not in vars(cls):
            continue
        parameters = inspect.signature(vars(cls)["__init__"]).parameters.values()
        variable = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
        names.update(dict.fromkeys(p.name for p in parameters if p.kind not in variable))
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            break
    return [name for name in names if name not in ("self", "params")]


def kwargs_from_config(
    optimizer_cls: type, prefixes: str | Sequence[str], config: object
) -> dict[str, Any]:
    """Return the constructor arguments that ``config`` has a value for.

    Args:
        optimizer_cls: The optimizer's class.
        prefixes: Prefixes to look up, the most specific first.
        config: An ``OptimizerConfig``, or anything with the same attributes.

    Raises:
        ConfigurationError: If an old spelling and the present one disagree.
    """
    prefixes = (prefixes,) if isinstance(prefixes, str) else tuple(prefixes)
    kwargs: dict[str, Any] = {}
    for name in constructor_arguments(optimizer_cls):
        value = _look_up(name, prefixes, config)
        if value is not _MISSING:
            kwargs[name] = value
    return kwargs


def weight_decay_kwargs(optimizer_cls: type, config: object) -> dict[str, Any]:
    """Return the argument that says whether weight decay is decoupled, under the class's name."""
    decoupled = getattr(config, "decoupled_weight_decay", True)
    arguments = constructor_arguments(optimizer_cls)
    if "use_decoupled_weight_decay" in arguments:
        return {"use_decoupled_weight_decay": decoupled}
    if "weight_decay_method" in arguments:
        return {"weight_decay_method": "decoupled" if decoupled else "l2"}
    return {}


def check_old_spellings(config: object, prefixes: Sequence[str]) -> None:
    """Raise if an old spelling and the present one of a field disagree.

    Raises:
        ConfigurationError: If they do.
    """
    for prefix in prefixes:
        for name in OLD_SPELLINGS.values():
            _resolve_old_spelling(name, prefix, config)


def first_field(config: object, name: str, prefixes: Sequence[str], default: Any = None) -> Any:
    """Return the first of the fields ``<prefix>_<name>`` that is set, else ``default``."""
    for prefix in prefixes:
        value = getattr(config, f"{prefix}_{name}", None)
        if value is not None:
            return value
    return default


def check_all_consumed(config: object, prefixes: Sequence[str], consumed: Iterable[str]) -> None:
    """Raise if a changed field has one of ``prefixes`` and is not among ``consumed``.

    Args:
        config: The configuration.
        prefixes: Prefixes in use.
        consumed: Names of the fields that somebody uses.

    Raises:
        ConfigurationError: For the first such field.
    """
    consumed = set(consumed)
    defaults = field_defaults(config)
    for name, value in vars(config).items():
        if name in consumed or not any(name.startswith(f"{prefix}_") for prefix in prefixes):
            continue
        if name in defaults and _same(defaults[name], value):
            continue
        raise ConfigurationError(
            name,
            value,
            "no optimizer in use takes this field, so changing it would have no effect",
            "Remove it, or correct its name",
        )


def consumed_fields(optimizer_cls: type, prefixes: Sequence[str]) -> set[str]:
    """Return the prefixed field names that the constructor's arguments are looked up under."""
    names = constructor_arguments(optimizer_cls)
    names += [old for old, new in OLD_SPELLINGS.items() if new in names]
    if "betas" in names:
        names += ["beta1", "beta2"]
    return {f"{prefix}_{name}" for prefix in prefixes for name in names}


def field_defaults(config: object) -> dict[str, Any]:
    """Return the default values of a dataclass's fields."""
    if not dataclasses.is_dataclass(config):
        return {}
    return {
        item.name: item.default_factory()
        if item.default_factory is not dataclasses.MISSING
        else item.default
        for item in dataclasses.fields(config)
    }


def _look_up(name: str, prefixes: Sequence[str], config: object) -> Any:
    for prefix in prefixes:
        value = _resolve_old_spelling(name, prefix, config)
        if value is not _MISSING and not (value is None and name in ("lr", "min_lr")):
            return value
        betas = [getattr(config, f"{prefix}_beta{number}", _MISSING) for number in (1, 2)]
        if name == "betas" and _MISSING not in betas:
            return tuple(betas)
    return getattr(config, name, _MISSING)


def _resolve_old_spelling(name: str, prefix: str, config: object) -> Any:
    field = f"{prefix}_{name}"
    value = getattr(config, field, _MISSING)
    default = field_defaults(config).get(field, _MISSING)
    for old, new in OLD_SPELLINGS.items():
        old_field = f"{prefix}_{old}"
        old_value = getattr(config, old_field, None)
        if new != name or old_value is None:
            continue
        if value is not _MISSING and not _same(value, default) and value != old_value:
            raise ConfigurationError(
                old_field,
                old_value,
                f"is an old spelling of {field}, which says {value!r}",
                f"Keep {field} only",
            )
        value = old_value
    return value


def _same(left: Any, right: Any) -> bool:
    return left is right or bool(left == right)
