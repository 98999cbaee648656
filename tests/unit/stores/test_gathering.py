"""Stepped weights reach all ranks: as DDP brings them."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig

from megatron_eopt.stores.gathering import gather_buckets, gather_shards
from tests.harness import run_ranks


def _of_all(dtype: torch.dtype) -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    buffer = torch.full((size * 3,), -1.0, dtype=dtype, device="cpu")
    buffer.chunk(size)[rank].fill_(rank)
    gather_shards(buffer, dist.group.WORLD)  # type: ignore[arg-type]
    return buffer.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_rank_gets_the_shards_of_all(ranks: int, dtype: torch.dtype) -> None:
    expected = [float(rank) for rank in range(ranks) for _ in range(3)]
    assert run_ranks(ranks, _of_all, dtype, cpu=True) == [expected] * ranks


@pytest.mark.parametrize(
    ("sharded", "overlap", "now", "expected"),
    [
        (True, False, False, [{"force_sync": False}]),
        (True, False, True, [{"force_sync": True}]),
        (True, True, True, [{"force_sync": True}]),
        # hooks of the next forward pass gather
        (True, True, False, []),
        (False, False, True, []),
    ],
)
def test_the_wrapper_gathers_unless_hooks_do(sharded, overlap, now, expected) -> None:
    called = []

    class Wrapper:
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=sharded, overlap_param_gather=overlap
        )

        def start_param_sync(self, **kwargs: bool) -> None:
            called.append(kwargs)

    gather_buckets(Wrapper(), now=now)
    assert called == expected
