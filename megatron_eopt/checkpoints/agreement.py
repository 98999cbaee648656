"""One outcome on all ranks: what one rank refuses, every rank refuses with the same words.

Without that, the rank that raises leaves the others waiting in their next collective call.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

from torch import distributed

from megatron_eopt.base.errors import ConfigurationError

__all__ = ["CheckpointError", "agreed", "everyones", "from_rank_0", "is_rank_0"]


class CheckpointError(ConfigurationError):
    """A checkpoint that cannot be loaded as it is; the same on every rank."""

    @classmethod
    def repeat(cls, argument: str, value: object, text: str) -> "CheckpointError":
        """Return the error that another rank raised.

        Args:
            argument: Its ``argument``.
            value: Its ``value``.
            text: Its message.
        """
        error = cls.__new__(cls, text)
        error.args = (text,)
        error.argument = argument
        error.value = value
        return error


def is_rank_0() -> bool:
    """Return whether this is rank 0, or the only process."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


def from_rank_0[T](function: Callable[[], T]) -> T:
    """Call ``function`` on rank 0 alone; return its result, or raise its error, on every rank."""
    return agreed(lambda: function() if is_rank_0() else None, source=0)  # type: ignore[arg-type,return-value]


def agreed[T](function: Callable[[], T], source: int | None = None) -> T:
    """Call ``function`` on every rank; raise everywhere what the first rank that failed raised.

    Args:
        function: Must not communicate.
        source: Rank whose result is returned; None means each rank's own.

    Raises:
        ConfigurationError: If some rank's function raised one.
        RuntimeError: On ranks other than those whose function raised something else.
    """
    result, error = _attempt(function)
    if not distributed.is_initialized():
        if error is not None:
            raise error
        return cast(T, result)
    report = None if error is None else _report(error)
    offer = result if source == distributed.get_rank() and error is None else None
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, (report, offer))
    for rank, (report, _) in enumerate(gathered):
        if report is not None:
            _raise(rank, report, error)
    return cast(T, result if source is None else gathered[source][1])


def everyones[T](items: Iterable[T]) -> list[T]:
    """Return the items of all ranks, in their order, without duplicates."""
    mine = list(items)
    if not distributed.is_initialized():
        return mine
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, mine)
    return list(dict.fromkeys(item for items in gathered for item in items))


def _attempt(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error


def _report(error: Exception) -> tuple[str, object, str] | str:
    if isinstance(error, ConfigurationError):
        return error.argument, repr(error.value), str(error)
    return f"{type(error).__name__}: {error}"


def _raise(rank: int, report: Any, own: Exception | None) -> None:
    if not isinstance(report, str):
        raise CheckpointError.repeat(*report) from own
    if own is not None:
        raise own
    raise RuntimeError(f"rank {rank} failed: {report}")
