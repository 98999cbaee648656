"""What one rank refuses, all refuse alike; none waits for another, or holds more than it must."""

import contextlib
import io
import os
import sys
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.distributed_c10d import _world

from megatron_eopt.base import agreement
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.quiet import report_errors_once
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks


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
            lambda: agreement.raise_together(lambda: refuse_on(1)),
            lambda: agreement.raise_together(lambda: refuse_on(1, 2)),
            lambda: agreement.from_rank_0(lambda: refuse_on(0)),
            lambda: agreement.raise_together(lambda: fail_on(1)),
            lambda: agreement.from_rank_0(lambda: fail_on(0)),
            lambda: agreement.from_rank_0(threading.Lock),
            lambda: agreement.from_rank_0(lambda: f"of {rank}"),
            lambda: agreement.gather_unique(["all", "all", rank]),
            lambda: agreement.gather_unique([]),
            lambda: agreement.gather_unique(["odd"] if rank % 2 else []),
            lambda: agreement.raise_together(lambda: f"of {rank}") == f"of {rank}",
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


class Peers:
    """Ranks that do not exist."""

    def __init__(self, number: int) -> None:
        self.number = number

    def gather_objects(self, value: Any, group: Any) -> list[Any]:
        return [value, self.number]

    def group_ranks(self, group: Any) -> list[agreement.GroupRank]:
        return [agreement.GroupRank(self.number, 0)]


def on_each_rank() -> dict[str, Any]:
    rank, calls, thing = distributed.get_rank(), [], ["thing"]
    kept = agreement.from_rank_0(lambda: calls.append(rank) or thing)
    pair = None if rank == 1 else agreement.group_of_members((0, 2))
    own = agreement.group_of_members((rank,))
    found = {
        "called": calls,
        "has the object itself": kept is thing,
        "any": (agreement.any_rank(rank == 1), agreement.any_rank(False)),
        "totals": agreement.totals([rank, 1]),
        "in pairs": outcome(lambda: agreement.raise_together_in(pair, lambda: refuse_on(1, 2))),
        "in groups of one": outcome(lambda: agreement.raise_together(lambda: fail_on(rank), own)),
        "positions": agreement.group_ranks_in([None, pair, distributed.group.WORLD]),
        "of other lengths": outcome(lambda: agreement.group_ranks_in([None] * (1 + rank))),
    }
    if rank == 1:
        # no other rank calls these
        with agreement.answered_by(Peers(5)):
            functions = (agreement.raise_together, agreement.from_rank_0)
            found["calls"] = [function(lambda: rank) for function in functions]
            found["lists"] = [
                agreement.totals([rank]),
                agreement.gather_unique([rank, rank]),
                agreement.gather_objects(rank),
            ]
    return found


def test_what_each_rank_gets():
    results = run_ranks(3, on_each_rank)
    refused = "ConfigurationError: argument={}: must be another. Give another."
    singles = [agreement.GroupRank(0, 0), agreement.GroupRank(1, 0), agreement.GroupRank(2, 0)]
    for rank, its in enumerate(results):
        assert its == {
            "called": [0] if rank == 0 else [],
            "has the object itself": rank == 0,
            "any": (True, False),
            "totals": [3, 3],
            "in pairs": refused.format(1 if rank == 1 else 2),
            "in groups of one": "KeyError: 'oops'",
            "positions": [
                singles,
                [agreement.GroupRank(0, 0), agreement.GroupRank(1, 0), agreement.GroupRank(0, 1)],
                [agreement.GroupRank(0, 0), agreement.GroupRank(0, 1), agreement.GroupRank(0, 2)],
            ],
            "of other lengths": "ValueError: zip() argument 2 is longer than argument 1",
            **({"calls": [1, 1], "lists": [[1], [1], [1, 5]]} if rank == 1 else {}),
        }


def test_the_innermost_stand_ins_answer():
    def answers() -> tuple[Any, ...]:
        return (
            agreement.gather_objects(3),
            agreement.any_rank(False),
            agreement.group_ranks_in([None, None]),
        )

    with agreement.answered_by(Peers(5)):
        outer = [3, 5], True, [[agreement.GroupRank(5, 0)]] * 2
        assert answers() == outer
        with agreement.answered_by(Peers(0)):
            assert answers() == ([3, 0], False, [[agreement.GroupRank(0, 0)]] * 2)
        assert answers() == outer
    assert agreement.gather_objects(3) == [3]


@pytest.mark.parametrize(
    ("backend", "device"),
    [(None, "cpu"), ("gloo", "cpu"), ("nccl", "cuda:1"), ("cpu:gloo,cuda:nccl", "cuda:1")],
)
def test_collectives_need_tensors_on_the_gpu_with_nccl_only(monkeypatch, backend, device):
    monkeypatch.setattr(distributed, "is_initialized", lambda: backend is not None)
    monkeypatch.setattr(distributed, "get_backend", lambda: backend or pytest.fail("no group"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert agreement.device_of_collectives() == torch.device(device)


@pytest.mark.parametrize(
    ("device", "backend", "options"),
    [
        (None, "cuda:nccl", None),
        (torch.device("cuda", 0), "cpu:gloo", None),
        (torch.device("cuda", 0), "cuda:nccl", SimpleNamespace(lazy_init=True, _timeout=9)),
    ],
)
def test_members_number_their_groups_alike_and_join_late(monkeypatch, device, backend, options):
    made = []

    def new_group(ranks: Any, *, pg_options: Any, **_: Any) -> None:
        made.append((ranks, _world.group_count, pg_options))

    options_class = SimpleNamespace(Options=SimpleNamespace)
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", options_class, raising=False)
    monkeypatch.setattr(distributed, "get_backend_config", lambda: backend)
    monkeypatch.setattr(distributed, "new_group", new_group)
    default = SimpleNamespace(bound_device_id=device)
    monkeypatch.setattr(agreement, "_get_default_group", lambda: default)
    monkeypatch.setattr(agreement, "_get_default_timeout", lambda _: 9)
    monkeypatch.setattr(agreement, "_made", Counter())
    before, teams = _world.group_count, ((3, 4), (3, 5), (3, 4))
    for team in teams:
        agreement.group_of_members(team)
    # no group that torch numbers itself has a negative number
    assert made == list(zip(teams, (-1, -1, -2), (options,) * 3, strict=True))
    assert _world.group_count == before


TEAMS = ((0, 1), (1, 2), (0, 1), (1, 2, 3))


@on_ranks(4)
def test_ranks_of_different_teams_make_groups_together_afterwards():
    """Check what each team's ranks add up to, and all ranks."""
    rank = distributed.get_rank()
    for team in TEAMS:
        if rank in team:
            value = torch.tensor(rank)
            distributed.all_reduce(value, group=agreement.group_of_members(team))
            assert value == sum(team)
    value = torch.tensor(rank)
    distributed.all_reduce(value, group=distributed.new_group(range(4)))
    assert value == 6


def test_alone_nothing_is_communicated():
    assert agreement.raise_together(lambda: 3) == agreement.from_rank_0(lambda: 3) == 3
    assert agreement.gather_unique([3, 3]) == [3]
    assert agreement.totals([3]) == [3]
    assert agreement.is_rank_0()
    assert agreement.group_rank_in([4, 2, 7], 7) == agreement.GroupRank(2, 2)
    for function in (agreement.raise_together, agreement.from_rank_0):
        with pytest.raises(agreement.CheckpointError):
            function(_refuse)


def _refuse() -> None:
    raise agreement.CheckpointError("a", 1, "b", "C")


def _printed_by_the_hook(group: bool, raised: Any = agreement.raise_together) -> bool:
    """Return whether a configuration error of all ranks, or of a group, would be printed."""
    printed = io.StringIO()
    original = sys.excepthook
    try:
        report_errors_once()
        peers = distributed.new_group([0, 1]) if group else None
        os.environ["RANK"] = str(distributed.get_rank())
        with pytest.raises(ConfigurationError) as caught:
            raised(_refuse, *([peers] if group else []))
        with contextlib.redirect_stderr(printed):
            sys.excepthook(caught.type, caught.value, caught.tb)
    finally:
        sys.excepthook = original
    return bool(printed.getvalue())


def test_a_configuration_error_is_one_sentence_unless_the_traceback_is_asked_for(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    report_errors_once()
    texts = []
    for wanted in ("0", "1"):
        monkeypatch.setenv("MEGATRON_EOPT_TRACEBACK", wanted)
        for error in (_refuse, lambda: 1 / 0):
            printed = io.StringIO()
            with contextlib.redirect_stderr(printed):
                try:
                    error()
                except Exception as raised:
                    sys.excepthook(type(raised), raised, raised.__traceback__)
            texts.append(printed.getvalue())
    assert texts[0] == "CheckpointError: a=1: b. C.\n(MEGATRON_EOPT_TRACEBACK=1 shows where)\n"
    assert all(text.startswith("Traceback") for text in texts[1:])


def test_rank_0_alone_prints_an_error_of_all_ranks():
    for function in (agreement.raise_together, agreement.from_rank_0):
        assert run_ranks(2, _printed_by_the_hook, False, function) == [True, False]
    assert run_ranks(2, _printed_by_the_hook, True) == [True, True]
