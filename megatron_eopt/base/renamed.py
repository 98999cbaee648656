"""Old names of public classes, functions and settings, which work for one more release."""

import dataclasses
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from megatron_eopt.base.errors import ConfigurationError

logger = logging.getLogger(__name__)

SETTINGS = {
    "muon_wave_mb": "matrix_buffer_mb",
    "muon_team_size": "muon_max_ranks_per_matrix",
    "muon_overlap_step": "muon_overlap_dp_comm",
    "muon_orthogonalize_excluded": "muon_ignore_use_muon",
    "checkpoint_fresh_state": "ckpt_allow_missing_optim_state",
    "muon_exempt_from_clipping": "muon_skip_grad_clip",
}
"""The names of settings, by their old ones."""


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module in which old ``names`` have become others."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        text = "%s.%s is called %s now: the old name goes with the next release"
        logger.warning(text, module, name, names[name])
        return getattr(sys.modules[module], names[name])

    return find


@functools.cache
def _tell(old: str, new: str) -> None:
    """Log the new name of a setting, once per process."""
    text = "%s is called %s now (--%s): the old name goes with the next release"
    logger.warning(text, old, new, new.replace("_", "-"))


def new_name(name: str) -> str:
    """Return the present name of a setting."""
    if name in SETTINGS:
        _tell(name, SETTINGS[name])
    return SETTINGS.get(name, name)


def new_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by their present names; None counts as not given.

    Raises:
        ConfigurationError: If a setting has different values under both names.
    """
    found = {name: value for name, value in values.items() if name not in SETTINGS}
    for old, value in values.items():
        if old in SETTINGS and value is not None:
            new = new_name(old)
            if found.get(new) not in (None, value):
                rule = f"is called {new} now, which has another value: {found[new]!r}"
                raise ConfigurationError(old, value, rule, f"Remove {old}")
            found[new] = value
    return found


def takes_old_arguments[F: Callable[..., Any]](**names: str) -> Callable[[F], F]:
    """Return the decorator of a function that takes keyword arguments by their old ``names``, too.

    Its signature has the new ones only.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old, new in names.items():
                if old in kwargs:
                    _tell(old, new)
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate


def alias(old: str) -> property:
    """Return the property by which a configuration has a setting under its old name, too."""
    return property(
        lambda self: getattr(self, new_name(old)),
        lambda self, value: setattr(self, new_name(old), value),
    )


class TakesOldNames(type):
    """Class of dataclasses whose constructors, and ``dataclasses.replace``, take old names."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct an instance."""
        both = [new for old, new in SETTINGS.items() if {old, new} <= kwargs.keys()]
        copied = {new for new in both if cls._is_copied(new, [*kwargs])}
        given = {name: value for name, value in kwargs.items() if name not in copied}
        return super().__call__(*args, **new_names(given))

    def _is_copied(cls, name: str, passed: list[str]) -> bool:
        """Whether ``dataclasses.replace`` passes a value that does not change.

        It passes what changes first, then all other fields in their order.
        """
        fields = [item.name for item in dataclasses.fields(cls) if item.init]  # type: ignore[arg-type]
        return {*fields[: fields.index(name)]} <= {*passed[: passed.index(name)]}

    @property
    def __signature__(cls) -> inspect.Signature:
        """The constructor's; Megatron's reader of configuration files drops all other names."""
        own = [*inspect.signature(cls.__init__).parameters.values()][1:]  # type: ignore[misc]
        old = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in SETTINGS]
        return inspect.Signature(sorted([*own, *old], key=lambda item: item.kind))
