"""What every refused configuration looks like.

A message names the argument, its value, the rule it breaks and the way out, so that whoever reads
it in a cluster's log can mend the run without reading our source.
"""

import difflib
import math
from collections.abc import Iterable
from operator import ge, gt, le, lt


class ConfigurationError(ValueError):
    """A value, or a combination of values, that cannot be honoured.

    Args:
        argument: Name of the option as the user wrote it (a flag, a field or a parameter).
        value: What the user gave.
        rule: What must hold, a clause without a full stop.
        way_out: What to do instead, likewise.
    """

    def __init__(self, argument: str, value: object, rule: str, way_out: str) -> None:
        super().__init__(f"{argument}={value!r}: {rule}. {way_out}.")
        self.argument = argument
        self.value = value


class ConfigurationTypeError(TypeError):
    """Like :class:`ConfigurationError`, for a value of the wrong kind."""

    def __init__(self, argument: str, value: object, rule: str, way_out: str) -> None:
        kind = type(value).__name__
        super().__init__(f"{argument}={value!r} (a {kind}): {rule}. {way_out}.")
        self.argument = argument
        self.value = value


class NonFiniteError(FloatingPointError):
    """A tensor holds inf or nan.

    Attributes:
        names: The tensors concerned.
    """

    def __init__(self, what: str, names: list[str]) -> None:
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        super().__init__(
            f"non-finite {what} of {shown}: a step would let one inf or nan stay in the weights, "
            "and an orthogonalization spread it over the whole matrix. No weight and no state has "
            "changed. Lower the learning rate, clip gradients, or find the layer that overflows; "
            "with loss scaling such a step is skipped before it comes here."
        )
        self.names = names


def check_choice(argument: str, value: object, choices: Iterable[str]) -> None:
    """Raise a ConfigurationError unless ``value`` is one of ``choices``; offers the nearest."""
    names = list(choices)
    if value in names:
        return
    near = difflib.get_close_matches(str(value), names, n=3)
    hint = f"Did you mean {' or '.join(map(repr, near))}" if near else "Choose one of these"
    raise ConfigurationError(argument, value, f"must be one of {', '.join(names)}", hint)


def check_integer(
    argument: str, value: object, *, at_least: int = 1, at_most: int = 2**63 - 1
) -> None:
    """Raise unless ``value`` is an integer within the given bounds.

    Raises:
        ConfigurationTypeError: If ``value`` is not an integer.
        ConfigurationError: If it is out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigurationTypeError(argument, value, "must be an integer", "Give a whole number")
    if not at_least <= value <= at_most:
        rule = f"must be an integer of at least {at_least} and at most {at_most}"
        raise ConfigurationError(argument, value, rule, "Choose one inside these bounds")


def check_number(
    argument: str,
    value: object,
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> None:
    """Raise unless ``value`` is a finite number within the given bounds.

    Raises:
        ConfigurationTypeError: If ``value`` is not a number.
        ConfigurationError: If it is not finite or out of bounds, or an int that torch cannot take.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigurationTypeError(argument, value, "must be a number", "Give a plain number")
    if isinstance(value, int) and value.bit_length() > 63:
        rule = "must fit in 64 bits if it is an int"
        raise ConfigurationError(argument, value, rule, "Write it as a float, such as 1e30")
    named = (
        ("at least", at_least, ge),
        ("above", above, gt),
        ("below", below, lt),
        ("at most", at_most, le),
    )
    bounds = [(word, bound, holds) for word, bound, holds in named if bound is not None]
    if not (math.isfinite(value) and all(holds(value, bound) for _, bound, holds in bounds)):
        words = " and ".join(f"{word} {bound:g}" for word, bound, _ in bounds)
        rule = f"must be a finite number {words}".rstrip()
        raise ConfigurationError(argument, value, rule, "Choose a value inside these bounds")
