"""What one rank refuses, all refuse alike; none waits for another, or holds more than it must."""

import os
import sys
import threading
from typing import Any

import pytest
from torch import distributed

from megatron_eopt.base.agreement import CheckpointError, from_rank_0, gather_unique, raise_together
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.quiet import report_errors_once
from tests.harness import run_ranks


def refuse_on(*ranks: int) -> None:
    rank = distributed.get_rank()
    if rank in ranks:
        raise ConfigurationError("argument", rank, "must be another", "Give another")


def fail_on(rank: int) -> None:
    if distributed.get_rank() == rank:
        raise KeyError("oops")


def outcome(function: Any) -> str:
    try:
        return str(function())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def outcomes() -> list[str]:
    rank = distributed.get_rank()
    return [
        outcome(function)
        for function in (
            lambda: raise_together(lambda: refuse_on(1)),
            lambda: raise_together(lambda: refuse_on(1, 2)),
            lambda: from_rank_0(lambda: refuse_on(0)),
            lambda: raise_together(lambda: fail_on(1)),
            lambda: from_rank_0(lambda: fail_on(0)),
            lambda: from_rank_0(threading.Lock),
            lambda: from_rank_0(lambda: f"of {rank}"),
            lambda: gather_unique(["all", "all", rank]),
            lambda: gather_unique([]),
            lambda: gather_unique(["odd"] if rank % 2 else []),
            lambda: raise_together(lambda: f"of {rank}") == f"of {rank}",
        )
    ]


def test_all_ranks_have_one_outcome():
    first, *others = run_ranks(3, outcomes)
    assert others == [first, first]
    assert first == [
        "ConfigurationError: argument=1: must be another. Give another.",
        "ConfigurationError: argument=1: must be another. Give another.",
        "ConfigurationError: argument=0: must be another. Give another.",
        "RuntimeError: rank 1 failed: KeyError: 'oops'",
        "RuntimeError: rank 0 failed: KeyError: 'oops'",
        "RuntimeError: rank 0 failed: TypeError: cannot pickle '_thread.lock' object",
        "of 0",
        "['all', 0, 1, 2]",
        "[]",
        "['odd']",
        "True",
    ]


def test_alone_nothing_is_communicated():
    assert raise_together(lambda: 3) == from_rank_0(lambda: 3) == 3
    assert gather_unique([3, 3]) == [3]
    for function in (raise_together, from_rank_0):
        with pytest.raises(CheckpointError):
            function(_refuse)


def _refuse() -> None:
    raise CheckpointError("a", 1, "b", "C")


def _printed_by_the_hook(group: bool) -> bool:
    """Return whether a configuration error of all ranks, or of a group, would be printed."""
    shown: list[BaseException] = []
    original, sys.excepthook = sys.excepthook, lambda _kind, error, _trace: shown.append(error)
    try:
        report_errors_once()
        peers = distributed.new_group([0, 1]) if group else None
        os.environ["RANK"] = str(distributed.get_rank())
        with pytest.raises(ConfigurationError) as caught:
            raise_together(_refuse, peers)
        sys.excepthook(caught.type, caught.value, None)
    finally:
        sys.excepthook = original
    return bool(shown)


def test_rank_0_alone_prints_an_error_of_all_ranks():
    assert run_ranks(2, _printed_by_the_hook, False) == [True, False]
    assert run_ranks(2, _printed_by_the_hook, True) == [True, True]
