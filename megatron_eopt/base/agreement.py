"""Makes all ranks reach the same outcome: if one rank raises an error, every rank raises it.

Otherwise the rank that raises leaves the others waiting in their next collective. Functions here
are collective over the default process group unless they take another group.
"""

import hashlib
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import torch
from torch import distributed
from torch.distributed.distributed_c10d import _get_default_group, _get_default_timeout, _world

from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError

_made: Counter[tuple[int, ...]] = Counter()  # how many groups of these ranks exist


class CheckpointError(ConfigurationError):
    """The checkpoint cannot be loaded into this run; raised on every rank."""


class GroupRank(NamedTuple):
    """A rank's position in one of its process groups."""

    first: int  # lowest global rank of the group
    number: int  # the rank's index in the group


class StandInPeers(Protocol):
    """Answers on behalf of ranks that do not exist, as in a dry run."""

    def gather_objects[T](self, value: T, group: distributed.ProcessGroup | None) -> list[T]:
        """Return one value for each rank of a group (None: the world)."""
        ...

    def group_ranks(self, group: distributed.ProcessGroup | None) -> list[GroupRank]:
        """Return every rank's position in its own group of this kind (None: a group of one)."""
        ...


_answers: list[StandInPeers] = []
"""Stand-ins for the other ranks, the innermost last; empty if the other ranks exist."""


@contextmanager
def answered_by(answers: StandInPeers) -> Iterator[None]:
    """Let ``answers`` stand in for all other ranks inside a ``with`` block."""
    _answers.append(answers)
    try:
        yield
    finally:
        _answers.pop()


def is_alone() -> bool:
    """Return whether no other rank takes part: stand-ins answer, or there is no process group."""
    return bool(_answers) or not distributed.is_initialized()


def unconnected_processes() -> int:
    """Return how many processes a launcher has started if they are not connected, else 0.

    Each would train a model of its own.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    # accelerate connects processes on CPUs, but uses that only if it was told to use CPUs
    state = sys.modules.get("accelerate.state")
    shared = {} if state is None else state.PartialState._shared_state
    unconnected = not distributed.is_initialized() or shared.get("num_processes") == 1
    return processes if processes > 1 and unconnected else 0


def is_rank_0() -> bool:
    """Return whether this is rank 0, or the only process."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


def device_of_collectives() -> torch.device:
    """Return the device that the default process group's collectives need tensors on."""
    on_gpu = distributed.is_initialized() and "nccl" in distributed.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def from_rank_0[T](function: Callable[[], T]) -> T:
    """Call ``function`` on rank 0 only; return its result, or raise its error, on every rank.

    Errors other than configuration errors become a RuntimeError, as do results that cannot be
    pickled.
    """
    if is_alone():
        return function()
    result, data, error = None, None, None
    if is_rank_0():
        try:
            result = function()
            # pickled here so that a failure is reported to the waiting ranks
            data = pickle.dumps(result)
        except Exception as caught:
            error = caught
    data, report = _broadcast((data, report_of(error)))
    if report is not None:
        raise_reported(0, report, error, is_on_all_ranks=True)
    return cast(T, result if is_rank_0() else pickle.loads(data))


def raise_together[T](
    function: Callable[[], T], group: distributed.ProcessGroup | None = None
) -> T:
    """Call ``function`` on every rank; if any rank raises, raise the lowest one's error on all.

    Success costs one all-reduce of an integer. Errors other than configuration errors become a
    RuntimeError.

    Args:
        function: May use collectives only where no rank can raise before its peers join.
        group: The ranks that call this together; None for the world.
    """
    # with stand-ins, there is nobody to wait for
    if is_alone() or (world := distributed.get_world_size(group)) == 1:
        return function()
    result, error = None, None
    try:
        result = function()
    except Exception as caught:
        error = caught
    rank = distributed.get_rank(group)
    # the lowest rank that failed, or `world` if none did: one number tells all ranks both
    first = torch.tensor(world if error is None else rank, device=device_of_collectives())
    distributed.all_reduce(first, distributed.ReduceOp.MIN, group=group)
    if (failed := int(first)) < world:
        # only after a failure, so that success costs no pickling
        report = _broadcast(report_of(error), failed, group)
        raise_reported(failed, report, error, is_on_all_ranks=group is None)
    return cast(T, result)


def raise_together_in[T](group: distributed.ProcessGroup | None, function: Callable[[], T]) -> T:
    """Call ``function`` on every rank of a group; if any raises, raise on all of them.

    As :func:`raise_together`, but a group of None is this rank alone, not the world.
    """
    return function() if group is None else raise_together(function, group)


def gather_unique[T](items: Iterable[T]) -> list[T]:
    """Return the items of all ranks in rank order, without duplicates.

    Equal lists are sent once and empty ones not at all.
    """
    local = list(items)
    if is_alone():
        return list(dict.fromkeys(local))
    # Equal lists can pickle to different bytes, if one has the same string twice as one object.
    # Then both are sent, which is slower but not wrong.
    digests = gather_objects(hashlib.blake2b(pickle.dumps(local)).digest() if local else None)
    unique: dict[T, None] = {}
    for digest in dict.fromkeys(digests):
        if digest is not None:
            unique |= dict.fromkeys(_broadcast(local, digests.index(digest)))
    return list(unique)


def gather_objects[T](value: T, group: distributed.ProcessGroup | None = None) -> list[T]:
    """Return the value of every rank of a group (None: the world), in rank order."""
    if _answers:
        return _answers[-1].gather_objects(value, group)
    if not distributed.is_initialized():
        return [value]
    gathered: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(gathered, value, group=group)
    return gathered


def any_rank(flag: bool) -> bool:
    """Return whether ``flag`` is true on any rank."""
    return any(gather_objects(flag))


def totals(counts: Sequence[int]) -> list[int]:
    """Return the element-wise sums of the ranks' integer lists, which have equal lengths."""
    if is_alone():
        return list(counts)
    sums = torch.tensor(list(counts), dtype=torch.int64, device=device_of_collectives())
    distributed.all_reduce(sums)
    return cast(list[int], sums.tolist())


def group_ranks_in(groups: Sequence[distributed.ProcessGroup | None]) -> list[list[GroupRank]]:
    """Return, for each of this rank's groups, every rank's position in its group of that kind.

    All ranks pass groups of the same kinds in the same order; None is a group of one rank.
    """
    if _answers:
        return [_answers[-1].group_ranks(group) for group in groups]
    positions = [group_rank_in(ranks_of(group)) for group in groups]
    return [list(of_kind) for of_kind in zip(*gather_objects(positions), strict=True)]


def group_rank_in(ranks: Sequence[int], rank: int | None = None) -> GroupRank:
    """Return a rank's position (default: this rank's) among the global ranks of its group."""
    return GroupRank(
        min(ranks), list(ranks).index(distributed.get_rank() if rank is None else rank)
    )


def ranks_of(group: distributed.ProcessGroup | None) -> list[int]:
    """Return the global ranks of a group; only this rank if the group is None."""
    return [distributed.get_rank()] if group is None else distributed.get_process_group_ranks(group)


def _broadcast(value: Any, source: int = 0, group: distributed.ProcessGroup | None = None) -> Any:
    values = [value]
    # `group_src` counts within the group, unlike `src`
    distributed.broadcast_object_list(values, group=group, group_src=source)
    return values[0]


def report_of(error: Exception | None) -> tuple[type, str, str, str] | str | None:
    """Return what other ranks need to raise an error, too; it can be pickled."""
    if isinstance(error, ConfigurationError | ConfigurationTypeError):
        # texts, because a value may be a tensor or something that does not pickle
        return type(error), error.argument, repr(error.value), str(error)
    return None if error is None else f"{type(error).__name__}: {error}"


def raise_reported(
    rank: int, report: Any, cause: Exception | None, *, is_on_all_ranks: bool
) -> NoReturn:
    """Raise the error that a rank has reported: a configuration error as it is."""
    if isinstance(report, str):
        raise RuntimeError(f"rank {rank} failed: {report}") from cause
    kind, argument, value, text = report
    # without the constructor, which would build the text again from values that this rank lacks
    error = kind.__new__(kind, text)
    error.args, error.argument, error.value = (text,), argument, value
    error.is_on_all_ranks = is_on_all_ranks
    raise error from cause


def group_of_members(ranks: Sequence[int], description: str | None = None) -> Any:
    """Create a process group of some global ranks; only these ranks call this.

    Torch derives a group's name from the number of groups that a rank has created, which may
    differ between members. This counts the groups of these ranks instead, as a negative number that
    no other group's name has.

    If the world was initialized with a ``device_id``, NCCL would split its communicator, which all
    ranks must join. The group then connects at its first collective.
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
        return distributed.new_group(
            members,
            # else torch requires that all ranks of the world call this
            use_local_synchronization=True,
            pg_options=options,
            group_desc=description,
        )
    finally:
        _world.group_count = made
