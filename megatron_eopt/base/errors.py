"""Error classes and value checks whose messages name the argument, its value and the fix."""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from operator import ge, gt, le, lt


def _sentence(hint: str) -> str:
    return hint if hint.endswith("?") else f"{hint}."


class ConfigurationError(ValueError):
    """A setting, or a combination of settings, is not supported.

    The message reads ``argument=value: rule. hint.``

    Args:
        argument: Name of the flag, field or parameter as the user wrote it.
        value: The value given.
        rule: What is wrong, without a full stop.
        hint: What to do about it, without a full stop.
    """

    is_on_all_ranks = False  # whether every rank of the job raises it

    def __init__(self, argument: str, value: object, rule: str, hint: str) -> None:
        super().__init__(f"{argument}={value!r}: {rule}. {_sentence(hint)}")
        self.argument = argument
        self.value = value


class ConfigurationTypeError(ConfigurationError, TypeError):
    """A setting has the wrong type; the same arguments as :class:`ConfigurationError`."""

    def __init__(self, argument: str, value: object, rule: str, hint: str) -> None:
        kind = type(value).__name__
        # not the parent's constructor, whose text lacks the type
        Exception.__init__(self, f"{argument}={value!r} (a {kind}): {rule}. {_sentence(hint)}")
        self.argument = argument
        self.value = value


class NonFiniteError(FloatingPointError):
    """A gradient or the gradient norm is inf or nan; ``names`` lists the parameters."""

    def __init__(self, what: str, names: list[str]) -> None:
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        super().__init__(
            f"non-finite {what} of {shown}: no weight or optimizer state has changed. Lower the "
            "learning rate, clip gradients, or find the layer that overflows. "
            "With loss scaling, a step like this is skipped."
        )
        self.names = names


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Make errors call settings what the caller calls them; ``names`` are by the raiser's names."""
    try:
        yield
    except ConfigurationError as error:
        # hints name settings, too
        text = re.sub(r"\b(\w+)=", lambda match: f"{names.get(match[1], match[1])}=", str(error))
        error.args, error.argument = (text,), names.get(error.argument, error.argument)
        raise


def did_you_mean(
    name: str,
    names: Iterable[str],
    otherwise: str,
    *,
    shown: Callable[[str], str] = repr,
    cutoff: float = 0.6,
) -> str:
    """Return a hint with the names, as they are ``shown``, most like one that does not exist."""
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=cutoff)
    return f"Did you mean {' or '.join(map(shown, near))}?" if near else otherwise


def check_choice(argument: str, value: object, choices: Iterable[str]) -> None:
    """Raise a ConfigurationError unless ``value`` is one of ``choices``; suggest near matches."""
    names = list(choices)
    if value in names:
        return
    hint = did_you_mean(str(value), names, "Choose one of them")
    raise ConfigurationError(argument, value, f"must be one of {', '.join(names)}", hint)


def refuse_deepspeed(is_there: bool) -> None:
    """Raise a ConfigurationError if DeepSpeed stores or steps the weights."""
    if is_there:
        rule = "its ZeRO flattens weights, so their matrices are not known"
        raise ConfigurationError("DeepSpeed", True, rule, "Use FSDP2 or DDP in its place")


def check_integer(
    argument: str, value: object, *, at_least: int = 1, at_most: int = 2**63 - 1
) -> None:
    """Raise an error unless ``value`` is an integer within the (inclusive) bounds.

    Raises:
        ConfigurationTypeError: If ``value`` is not an integer.
        ConfigurationError: If it is out of bounds.
    """
    # Python counts booleans among the integers
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigurationTypeError(argument, value, "must be an integer", "Give a whole number")
    if not at_least <= int(value) <= at_most:
        rule = f"must be an integer of at least {at_least} and at most {at_most}"
        raise ConfigurationError(argument, value, rule, "Choose one within these bounds")


def check_cautious(argument: str, *, decoupled: bool) -> None:
    """Raise a ConfigurationError for cautious weight decay that is not decoupled."""
    if not decoupled:
        rule = "needs decoupled weight decay, since l2 weight decay is a part of the update"
        raise ConfigurationError(argument, True, rule, "Turn it off, or decouple weight decay")


def check_number(
    argument: str,
    value: object,
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> None:
    """Raise an error unless ``value`` is a finite number within the given bounds.

    Raises:
        ConfigurationTypeError: If ``value`` is not a number.
        ConfigurationError: If it is not finite or out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigurationTypeError(argument, value, "must be a number", "Give a plain number")
    named = (
        ("at least", at_least, ge),
        ("above", above, gt),
        ("below", below, lt),
        ("at most", at_most, le),
    )
    bounds = [(word, bound, holds) for word, bound, holds in named if bound is not None]
    fits = [holds(value, bound) for _, bound, holds in bounds]
    if not (math.isfinite(value) and all(fits)):
        words = " and ".join(f"{word} {bound:g}" for word, bound, _ in bounds)
        rule = f"must be a finite number {words}".rstrip()
        raise ConfigurationError(argument, value, rule, "Choose a value within these bounds")
