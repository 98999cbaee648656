"""Equal stacks of a dry run are computed once, and counted as if each were computed."""

from importlib import import_module
from typing import Any
from unittest.mock import patch

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


def counted(*, once: bool) -> tuple[dict[Any, Any], int, int]:
    """Return what is counted, the growth of memory, and how many stacks were computed."""
    compute = Orthogonalization(steps=3)
    with (
        dry_world(0, 1),
        patch.object(MODULE, "_iterate", side_effect=MODULE._iterate) as computed,
        patch.object(Orthogonalization, "factors_", Orthogonalization.factors_ if once else PLAIN),
    ):
        stacks = [torch.empty(shape) for shape in SHAPES]
        for stack in stacks:  # a first step, whose counts nobody reads
            compute.factors_(stack, None, tuple(stack.shape[1:]))
        with Counts() as counts, LiveBytes() as live:
            for stack in stacks:
                compute.factors_(stack, None, tuple(stack.shape[1:]))
        return dict(counts.phases), live.peak, computed.call_count


def both() -> list[Any]:
    dist.destroy_process_group()
    return [counted(once=True), counted(once=False)]


def test_equal_stacks_are_computed_once_and_all_are_counted():
    (once, each), *_ = run_ranks(1, both, cpu=False)
    assert once[:2] == each[:2]
    assert sum(amount.flops for amount in once[0].values()) > 0 < once[1]
    assert (once[2], each[2]) == (2 * 3, 2 * 5)
