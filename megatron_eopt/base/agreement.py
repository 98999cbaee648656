"""One outcome on all ranks: what one rank refuses, every rank refuses with the same words.

Without that, the rank that raises leaves the others waiting in their next collective call. All
functions here are called by all ranks of the default process group together, unless they name
another. What may be long travels once: nothing is padded to the largest rank's size.
"""

import hashlib
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import torch
from torch import distributed
from torch.distributed.distributed_c10d import _get_default_group, _get_default_timeout, _world

from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError

_made: Counter[tuple[int, ...]] = Counter()  # groups of these ranks, see group_of_members


class CheckpointError(ConfigurationError):
    """A checkpoint that cannot be loaded as it is; the same on every rank."""


class GroupRank(NamedTuple):
    """Where a rank stands in its group of one kind."""

    first: int  # the group's lowest global rank
    number: int  # the rank's number in the group


class Answers(Protocol):
    """What peers would say that are not there; they agree with whatever this rank decides."""

    def of_every_rank[T](self, value: T, group: distributed.ProcessGroup | None) -> list[T]:
        """Return the values of all ranks of a group (None: the world)."""
        ...

    def group_ranks(self, group: distributed.ProcessGroup | None) -> list[GroupRank]:
        """Return every rank's place in its group of this one's kind (None: itself alone)."""
        ...


_answers: list[Answers] = []
"""Who answers for the peers, the innermost last; empty where they speak for themselves."""


@contextmanager
def answered_by(answers: Answers) -> Iterator[None]:
    """Ask no rank but this one in a block: ``answers`` speaks for the others."""
    _answers.append(answers)
    try:
        yield
    finally:
        _answers.pop()


def _is_alone() -> bool:
    return bool(_answers) or not distributed.is_initialized()


def is_rank_0() -> bool:
    """Return whether this is rank 0, or the only process."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


def device_of_collectives() -> torch.device:
    """Return where tensors must lie that the default process group moves."""
    on_gpu = distributed.is_initialized() and "nccl" in distributed.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def from_rank_0[T](function: Callable[[], T]) -> T:
    """Call ``function`` on rank 0 alone; return its result, or raise its error, on every rank.

    Errors but ConfigurationErrors, and results that cannot be pickled, are a RuntimeError.
    """
    if _is_alone():
        return function()
    result, data, error = None, None, None
    if is_rank_0():
        try:
            result = function()
            # the others wait, so that a result which cannot be sent is an error like any other
            data = pickle.dumps(result)
        except Exception as caught:
            error = caught
    data, report = _broadcast((data, _report(error)))
    if report is not None:
        _raise(0, report, error)
    return cast(T, result if is_rank_0() else pickle.loads(data))


def agreed[T](function: Callable[[], T], group: distributed.ProcessGroup | None = None) -> T:
    """Call ``function`` on every rank; raise everywhere what the first rank that failed raised.

    If none has failed, that takes one number of each rank. A function may communicate only where no
    rank can fail alone meanwhile. Errors that are not ours become a RuntimeError.

    Args:
        function: What to call.
        group: The ranks that call this together; None for the world.
    """
    if _is_alone() or (world := distributed.get_world_size(group)) == 1:
        return function()
    result, error = None, None
    try:
        result = function()
    except Exception as caught:
        error = caught
    rank = distributed.get_rank(group)
    first = torch.tensor(world if error is None else rank, device=device_of_collectives())
    distributed.all_reduce(first, distributed.ReduceOp.MIN, group=group)
    if (failed := int(first)) < world:
        _raise(failed, _broadcast(_report(error), failed, group), error)
    return cast(T, result)


def agreed_in[T](group: distributed.ProcessGroup | None, function: Callable[[], T]) -> T:
    """Do the same as :func:`agreed` over a group, which is this rank alone if it is None."""
    return function() if group is None else agreed(function, group)


def everyones[T](items: Iterable[T]) -> list[T]:
    """Return the items of all ranks, in their order, without duplicates.

    Lists that several ranks have travel once, and empty ones, as lists of faults mostly are, not
    at all.
    """
    mine = list(items)
    if _is_alone():
        return list(dict.fromkeys(mine))
    digests = of_every_rank(hashlib.blake2b(pickle.dumps(mine)).digest() if mine else None)
    found: dict[T, None] = {}
    for digest in dict.fromkeys(digests):
        if digest is not None:
            found |= dict.fromkeys(_broadcast(mine, digests.index(digest)))
    return list(found)


def of_every_rank[T](value: T, group: distributed.ProcessGroup | None = None) -> list[T]:
    """Return the small values of all ranks of a group (None: the world), in their order."""
    if _answers:
        return _answers[-1].of_every_rank(value, group)
    if not distributed.is_initialized():
        return [value]
    gathered: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(gathered, value, group=group)
    return gathered


def any_rank(flag: bool) -> bool:
    """Return whether ``flag`` is true on any rank."""
    return any(of_every_rank(flag))


def totals(mine: Sequence[int]) -> list[int]:
    """Return the sums over all ranks of equally many integers of each."""
    if _is_alone():
        return list(mine)
    found = torch.tensor(list(mine), dtype=torch.int64, device=device_of_collectives())
    distributed.all_reduce(found)
    sums: list[int] = found.tolist()
    return sums


def group_ranks_in(groups: Sequence[distributed.ProcessGroup | None]) -> list[list[GroupRank]]:
    """Return, for each of this rank's groups, every rank's place in its own group of that kind.

    All ranks list groups of the same kinds. None is a group of this rank alone.
    """
    if _answers:
        return [_answers[-1].group_ranks(group) for group in groups]
    mine = [group_rank_in(ranks_of(group)) for group in groups]
    return [list(places) for places in zip(*of_every_rank(mine), strict=True)]


def group_rank_in(ranks: Sequence[int], rank: int | None = None) -> GroupRank:
    """Return the place of a rank, by default this one, among the global ranks of its group."""
    return GroupRank(
        min(ranks), list(ranks).index(distributed.get_rank() if rank is None else rank)
    )


def ranks_of(group: distributed.ProcessGroup | None) -> list[int]:
    """Return the global ranks of a group, this one alone if it is None."""
    return [distributed.get_rank()] if group is None else distributed.get_process_group_ranks(group)


def _broadcast(value: Any, source: int = 0, group: distributed.ProcessGroup | None = None) -> Any:
    values = [value]
    distributed.broadcast_object_list(values, group=group, group_src=source)
    return values[0]


def _report(error: Exception | None) -> tuple[type, str, str, str] | str | None:
    if isinstance(error, ConfigurationError | ConfigurationTypeError):
        return type(error), error.argument, repr(error.value), str(error)
    return None if error is None else f"{type(error).__name__}: {error}"


def _raise(rank: int, report: Any, own: Exception | None) -> NoReturn:
    if isinstance(report, str):
        raise RuntimeError(f"rank {rank} failed: {report}") from own
    kind, argument, value, text = report
    error = kind.__new__(kind, text)
    error.args, error.argument, error.value = (text,), argument, value
    raise error from own


def group_of_members(ranks: Sequence[int]) -> Any:
    """Return a new group of some global ranks; they alone call this together.

    Torch names groups by how many a rank has made, this kind with its ranks. Members of different
    teams have made different numbers, and could make no more groups together: here the ranks' own
    number takes its place, negative so that no other group has the name, and the count stays.

    NCCL splits a world that was initialized with a ``device_id``, and all of its ranks would have
    to take part in that; there the group is connected by its first collective call instead.
    """
    options: Any = None
    bound = _get_default_group().bound_device_id
    if bound is not None and "nccl" in distributed.get_backend_config():
        options = distributed.ProcessGroupNCCL.Options()
        options.lazy_init = True
        options._timeout = _get_default_timeout(distributed.Backend("nccl"))
    members, made = tuple(ranks), _world.group_count
    _made[members] += 1
    _world.group_count = -_made[members]
    try:
        return distributed.new_group(members, use_local_synchronization=True, pg_options=options)
    finally:
        _world.group_count = made
