"""Stepped weights reach all ranks: as DDP brings them, and on gloo in place."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig

from megatron_eopt.stores import gathering
from megatron_eopt.stores.gathering import gather_buckets, gather_shards
from tests.harness import run_ranks
from tests.harness.megatron import gathered_as_on_gpus, initialize_megatron
from tests.harness.models import tiny_gpt, wrap_ddp


def _of_all(way: str) -> list[list[float]]:
    initialize_megatron()
    rank, size = dist.get_rank(), dist.get_world_size()
    buffers = []
    for number, dtype in enumerate((torch.float32, torch.bfloat16)):
        buffer = torch.full((size * (number + 2),), -1.0, dtype=dtype, device="cpu")
        buffer.chunk(size)[rank].fill_(10 * number + rank)
        buffers.append(buffer)
    ways = {
        "whatever is possible": nullcontext(),
        "sent": patch.object(gathering, "read_shards", lambda *_: False),
        "as on GPUs": gathered_as_on_gpus(),
    }
    with ways[way]:
        gather_shards(buffers, dist.group.WORLD)  # type: ignore[arg-type]
    return [buffer.tolist() for buffer in buffers]


@pytest.mark.parametrize("way", ["whatever is possible", "sent", "as on GPUs"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_the_shards_of_all(ranks: int, way: str) -> None:
    expected = [
        [float(10 * number + rank) for rank in range(ranks) for _ in range(number + 2)]
        for number in range(2)
    ]
    assert run_ranks(ranks, _of_all, way, cpu=True) == [expected] * ranks


def _as_ddp_gathers(overlap: bool, now: bool) -> dict[str, Any]:
    initialize_megatron()
    torch.manual_seed(1)
    flags = {"overlap_param_gather": overlap, "overlap_grad_reduce": overlap}
    chunk: Any = wrap_ddp(
        tiny_gpt(layers=1, experts=2, dtype=torch.bfloat16), use_distributed_optimizer=True, **flags
    )
    bucket_groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
    flats = [bucket.param_data for one in bucket_groups for bucket in one.buckets]
    rank, size = dist.get_rank(), dist.get_world_size()

    def stepped() -> None:
        # every rank knows its own shard alone
        for number, flat in enumerate(flats):
            flat.fill_(float("nan"))
            flat.chunk(size)[rank].fill_(10 * number + rank)

    called: list[bool] = []
    plain = chunk.start_param_sync

    def start_param_sync(*args: Any, **kwargs: Any) -> None:
        called.append(True)
        plain(*args, **kwargs)

    stepped()
    plain(force_sync=True)
    expected = [flat.clone() for flat in flats]
    stepped()
    for one in bucket_groups:
        one.param_gather_dispatched = False
    chunk.start_param_sync = start_param_sync
    gather_buckets(chunk, now=now)
    return {
        "by DDP": bool(called),
        "gathered": all(map(torch.equal, flats, expected)),
        "dispatched": all(one.param_gather_dispatched for one in bucket_groups),
    }


@pytest.mark.parametrize("now", [False, True])
def test_on_gloo_buckets_are_gathered_in_place_as_ddp_gathers_them(now: bool) -> None:
    for found in run_ranks(2, _as_ddp_gathers, False, now, cpu=True):
        assert found == {"by DDP": False, "gathered": True, "dispatched": True}


def test_what_hooks_gather_is_left_to_ddp() -> None:
    for found in run_ranks(2, _as_ddp_gathers, True, True, cpu=True):
        assert found == {"by DDP": True, "gathered": True, "dispatched": True}
    for found in run_ranks(2, _as_ddp_gathers, True, False, cpu=True):
        assert found == {"by DDP": False, "gathered": False, "dispatched": False}


def _in_megatron_fsdp() -> list[dict[str, Any]]:
    initialize_megatron()
    called = []
    wrapper = SimpleNamespace(
        ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=True),
        start_param_sync=lambda **kwargs: called.append(kwargs),
    )
    gather_buckets(wrapper, now=True)
    return called


def test_a_wrapper_without_buckets_gathers_by_itself() -> None:
    assert run_ranks(2, _in_megatron_fsdp, cpu=True) == [[{"force_sync": True}]] * 2
