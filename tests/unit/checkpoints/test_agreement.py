"""What one rank refuses, all refuse alike, and none waits for another."""

import pytest
from torch import distributed

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.checkpoints.agreement import CheckpointError, agreed, everyones, from_rank_0
from tests.harness import run_ranks


def refuse_on(rank: int) -> None:
    if distributed.get_rank() == rank:
        raise ConfigurationError("argument", rank, "must be another", "Give another")


def fail_on(rank: int) -> None:
    if distributed.get_rank() == rank:
        raise KeyError("oops")


def outcomes() -> list[str]:
    results = []
    for function in (
        lambda: agreed(lambda: refuse_on(1)),
        lambda: from_rank_0(lambda: refuse_on(0)),
        lambda: agreed(lambda: fail_on(1)),
    ):
        try:
            function()
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    rank = distributed.get_rank()
    results.append(str(from_rank_0(lambda: f"of {rank}")))
    results.append(str(agreed(lambda: f"of {rank}")))
    results.append(str(everyones(["both", rank])))
    return results


def test_all_ranks_have_one_outcome():
    first, second = run_ranks(2, outcomes)
    assert first[0] == second[0] == "CheckpointError: argument=1: must be another. Give another."
    assert first[1] == second[1] == "CheckpointError: argument=0: must be another. Give another."
    assert first[2] == "RuntimeError: rank 1 failed: KeyError: 'oops'"
    assert second[2] == "KeyError: 'oops'"
    assert (first[3], second[3]) == ("of 0", "of 0")
    assert (first[4], second[4]) == ("of 0", "of 1")
    assert first[5] == second[5] == "['both', 0, 1]"


def test_alone_nothing_is_communicated():
    assert agreed(lambda: 3) == from_rank_0(lambda: 3) == 3
    assert everyones([3]) == [3]
    with pytest.raises(ConfigurationError):
        agreed(lambda: _refuse())


def _refuse() -> None:
    raise CheckpointError("a", 1, "b", "C")
