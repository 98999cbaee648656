"""Equal stacks of a dry run are computed once, and counted as if each were computed."""

from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.base.live_bytes import LiveBytes
from megatron_eopt.math.orthogonalize import Orthogonalization
from megatron_eopt.tools.dry_run import dry_world
from megatron_eopt.tools.dry_run.counting import Counts
from tests.harness import run_ranks

SHAPES = [(2, 8, 16), (2, 8, 16), (1, 8, 16), (2, 16, 8), (2, 8, 16)]
MODULE: Any = import_module("megatron_eopt.math.orthogonalize")
PLAIN = Orthogonalization.factors_


def other_signature(self: Any, shape: Any, reduce: Any, *, matrices: Any, squares: Any) -> None:
    PLAIN(self, matrices, reduce, shape, squares=squares)


def not_in_place(_self: Any, stack: Any, *_: Any) -> Any:
    return stack.clone()


def with_plain(compute: Any, stack: Any, _: Any) -> None:
    compute.factors_(stack, None, tuple(stack.shape[1:]))


def with_other(compute: Any, stack: Any, squares: Any) -> None:
    compute.factors_(tuple(stack.shape[1:]), None, matrices=stack, squares=squares)


def counted(factors_: Any, call: Any, *, once: bool) -> tuple[dict[Any, Any], int, int]:
    """Return what is counted, the growth of memory, and how many stacks were computed."""
    compute = Orthogonalization(steps=3)
    with (
        patch.object(Orthogonalization, "factors_", factors_),
        dry_world(0, 1),
        patch.object(MODULE, "_iterate_", side_effect=MODULE._iterate_) as computed,
        patch.object(
            Orthogonalization, "factors_", Orthogonalization.factors_ if once else factors_
        ),
    ):
        stacks = [(torch.empty(shape), torch.empty(shape[0], 4)) for shape in SHAPES]
        for stack in stacks:  # a first step, whose counts nobody reads
            call(compute, *stack)
        with Counts() as counts, LiveBytes() as live:
            for stack in stacks:
                call(compute, *stack)
        return dict(counts.phases), live.peak, computed.call_count


def both(factors_: Any, call: Any) -> list[Any]:
    dist.destroy_process_group()
    return [counted(factors_, call, once=once) for once in (True, False)]


@pytest.mark.parametrize(
    ("factors_", "call"),
    [(PLAIN, with_plain), (other_signature, with_other)],
    ids=["ours", "another signature"],
)
def test_equal_stacks_are_computed_once_and_all_are_counted(factors_, call):
    (once, each), *_ = run_ranks(1, both, factors_, call, cpu=False)
    assert once[:2] == each[:2]
    assert sum(amount.flops for amount in once[0].values()) > 0 < once[1]
    assert (once[2], each[2]) == (2 * 3, 2 * 5)


def test_a_result_that_would_be_lost_raises():
    with pytest.raises(Exception, match="must work in place"):
        run_ranks(1, both, not_in_place, with_plain, cpu=False)
