"""What one rank refuses, all refuse alike; none waits for another, or holds more than it must."""

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_eopt.base.agreement import CheckpointError, agreed, everyones, from_rank_0
from megatron_eopt.base.errors import ConfigurationError
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
            lambda: agreed(lambda: refuse_on(1)),
            lambda: agreed(lambda: refuse_on(1, 2)),
            lambda: from_rank_0(lambda: refuse_on(0)),
            lambda: agreed(lambda: fail_on(1)),
            lambda: from_rank_0(lambda: fail_on(0)),
            lambda: from_rank_0(threading.Lock),
            lambda: from_rank_0(lambda: f"of {rank}"),
            lambda: everyones(["all", "all", rank]),
            lambda: everyones([]),
            lambda: everyones(["odd"] if rank % 2 else []),
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
    ]


def own_results() -> str:
    rank = distributed.get_rank()
    return agreed(lambda: f"of {rank}")


def test_each_rank_has_its_own_result():
    assert run_ranks(2, own_results) == ["of 0", "of 1"]


class _Received(TorchDispatchMode):
    """Counts collectives by name, and the bytes of the buffers that they fill on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        library, _, name = func._schema.name.partition("::")
        if library == "c10d":
            self.calls[name] += 1
            # the first argument is what is filled
            self.bytes += sum(t.nbytes for t in tree_leaves(args[0]) if torch.is_tensor(t))
        return func(*args, **(kwargs or {}))


PAYLOAD = 1_000_000


def costs() -> dict[str, tuple[dict[str, int], int]]:
    rank = distributed.get_rank()
    keys = [f"{number:010d}" for number in range(PAYLOAD // 20)]
    functions = {
        "from rank 0": lambda: from_rank_0(lambda: "x" * PAYLOAD),
        "agreed": lambda: agreed(lambda: "x" * PAYLOAD),
        "refused": lambda: outcome(lambda: agreed(lambda: refuse_on(2))),
        "none has any": lambda: everyones([]),
        "one has some": lambda: everyones(keys if rank == 2 else []),
        "all have the same": lambda: everyones(keys),
        "all have others": lambda: everyones([rank]),
    }
    found = {}
    for name, function in functions.items():
        with _Received() as received:
            function()
        found[name] = (dict(received.calls), received.bytes)
    return found


def test_no_rank_receives_more_than_the_payload():
    for found in run_ranks(4, costs):
        calls = {name: sum(counted.values()) for name, (counted, _) in found.items()}
        size = {name: received for name, (_, received) in found.items()}
        assert calls == {
            "from rank 0": 2,
            "agreed": 1,
            "refused": 3,
            "none has any": 1,
            "one has some": 2,
            "all have the same": 2,
            "all have others": 5,
        }
        assert PAYLOAD <= size["from rank 0"] <= PAYLOAD + 1000
        assert size["agreed"] == 8
        assert size["refused"] <= 1000
        assert size["none has any"] == 4 * 16
        assert PAYLOAD / 2 <= size["one has some"] <= PAYLOAD
        assert size["all have the same"] == size["one has some"]
        assert size["all have others"] <= 1000


def test_alone_nothing_is_communicated():
    assert agreed(lambda: 3) == from_rank_0(lambda: 3) == 3
    assert everyones([3, 3]) == [3]
    for function in (agreed, from_rank_0):
        with pytest.raises(CheckpointError):
            function(_refuse)


def _refuse() -> None:
    raise CheckpointError("a", 1, "b", "C")
