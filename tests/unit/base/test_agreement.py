"""What one rank refuses, all refuse alike; none waits for another, or holds more than it must."""

import contextlib
import io
import os
import sys
import threading
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed
from torch.distributed.distributed_c10d import _world

from megatron_eopt.base import agreement
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.quiet import report_errors_once
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


REFUSED = "ConfigurationError: argument={}: must be another. Give another."


@on_ranks(3)
def test_all_ranks_have_one_outcome():
    rank, failed = distributed.get_rank(), "RuntimeError: rank {} failed: {}"
    pickled = "TypeError: cannot pickle '_thread.lock' object"
    for function, what, expected in (
        (agreement.raise_together, lambda: refuse_on(1), REFUSED.format(1)),
        (agreement.raise_together, lambda: refuse_on(1, 2), REFUSED.format(1)),
        (agreement.from_rank_0, lambda: refuse_on(0), REFUSED.format(0)),
        (agreement.raise_together, lambda: fail_on(1), failed.format(1, "KeyError: 'oops'")),
        (agreement.from_rank_0, lambda: fail_on(0), failed.format(0, "KeyError: 'oops'")),
        (agreement.from_rank_0, threading.Lock, failed.format(0, pickled)),
        (agreement.from_rank_0, lambda: f"of {rank}", "of 0"),
        (agreement.gather_unique, ["all", "all", rank], "['all', 0, 1, 2]"),
        (agreement.gather_unique, [], "[]"),
        (agreement.gather_unique, ["odd"] if rank % 2 else [], "['odd']"),
        (agreement.raise_together, lambda: f"of {rank}", f"of {rank}"),
    ):
        assert outcome(partial(function, what)) == expected


class Peers:
    """Ranks that do not exist."""

    def __init__(self, number: int) -> None:
        self.number = number

    def gather_objects(self, value: Any, group: Any) -> list[Any]:
        return [value, self.number]

    def group_ranks(self, group: Any) -> list[agreement.GroupRank]:
        return [agreement.GroupRank(self.number, 0)]


@on_ranks(3)
def test_what_each_rank_gets():
    rank, calls, thing = distributed.get_rank(), [], ["thing"]
    kept = agreement.from_rank_0(lambda: calls.append(rank) or thing)
    assert calls == ([0] if rank == 0 else [])
    assert (kept is thing) == (rank == 0)
    pair = None if rank == 1 else agreement.group_of_members((0, 2))
    own = agreement.group_of_members((rank,))
    assert (agreement.any_rank(rank == 1), agreement.any_rank(False)) == (True, False)
    assert agreement.totals([rank, 1]) == [3, 3]
    in_pairs = outcome(lambda: agreement.raise_together_in(pair, lambda: refuse_on(1, 2)))
    assert in_pairs == REFUSED.format(1 if rank == 1 else 2)
    in_groups_of_one = outcome(lambda: agreement.raise_together(lambda: fail_on(rank), own))
    assert in_groups_of_one == "KeyError: 'oops'"
    positions = agreement.group_ranks_in([None, pair, distributed.group.WORLD])
    assert positions == [
        [agreement.GroupRank(*place) for place in places]
        for places in ([(0, 0), (1, 0), (2, 0)], [(0, 0), (1, 0), (0, 1)], [(0, 0), (0, 1), (0, 2)])
    ]
    of_other_lengths = outcome(lambda: agreement.group_ranks_in([None] * (1 + rank)))
    assert of_other_lengths == "ValueError: zip() argument 2 is longer than argument 1"
    if rank == 1:
        # no other rank calls these
        with agreement.answered_by(Peers(5)):
            for function in (agreement.raise_together, agreement.from_rank_0):
                assert function(lambda: rank) == 1
            assert agreement.totals([rank]) == agreement.gather_unique([rank, rank]) == [1]
            assert agreement.gather_objects(rank) == [1, 5]


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


@on_ranks(4)
def test_ranks_of_different_teams_make_groups_together_afterwards():
    """Check what each team's ranks add up to, and all ranks."""
    rank = distributed.get_rank()
    for team in ((0, 1), (1, 2), (0, 1), (1, 2, 3)):
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


@on_ranks(2)
def test_rank_0_alone_prints_an_error_of_all_ranks():
    rank, groups = distributed.get_rank(), [distributed.new_group([0, 1])]
    with patch.object(sys, "excepthook", sys.excepthook), patch.dict(os.environ, RANK=str(rank)):
        report_errors_once()
        for function, given, is_printed in (
            (agreement.raise_together, [], rank == 0),
            (agreement.from_rank_0, [], rank == 0),
            (agreement.raise_together, groups, True),
        ):
            printed = io.StringIO()
            with pytest.raises(ConfigurationError) as caught:
                function(_refuse, *given)
            with contextlib.redirect_stderr(printed):
                sys.excepthook(caught.type, caught.value, caught.tb)
            assert bool(printed.getvalue()) == is_printed
