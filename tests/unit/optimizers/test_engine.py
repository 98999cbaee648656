"""The engine on its own: any storage, any mode, and what it refuses."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.layouts import Layout
from megatron_eopt.matrices import qkv, whole
from megatron_eopt.optimizers.exchange import ExchangeConfig, MatrixExchange
from megatron_eopt.storage.shard import Fragment, ParamShard
from megatron_eopt.storage.slabs import partition_dim_and_group, row_group
from tests.harness.each_rank import on_ranks
from tests.harness.shards import StoredParameter, newton_schulz

EXACT = ("duplicated", "exchange", "distributed", "auto")


UNEVEN = {
    "rows": (whole((96, 40)), [(0, 50 * 40), (50 * 40, 96 * 40)]),
    "very uneven rows": (whole((96, 40)), [(0, 90 * 40), (90 * 40, 96 * 40)]),
    "inside a row": (whole((40, 96)), [(0, 1001), (1001, 3840)]),
    "all on one": (whole((48, 48)), [(0, 0), (0, 2304)]),
    "fused, inside a row": (qkv((96, 40), (32, 8, 8)), [(0, 1999), (1999, 3840)]),
}


@pytest.mark.parametrize("batched", [True, False])
@on_ranks(2)
def test_uneven_shards(batched):
    rank = dist.get_rank()
    stored = [
        StoredParameter(name, split, -1, 1, tuple(Fragment(0, *bounds) for bounds in ranges))
        for name, (split, ranges) in UNEVEN.items()
    ]
    alone = [
        StoredParameter(p.name, p.split, -1, 1, (Fragment(0, 0, p.numel),)).shard() for p in stored
    ]
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(p.split.shape, generator=generator) for p in stored]
    wants = MatrixExchange(alone, newton_schulz(), ExchangeConfig(batched=batched)).updates(full)
    shards = [p.shard(dist.group.WORLD) for p in stored]
    for mode in EXACT:
        engine = MatrixExchange(shards, newton_schulz(), ExchangeConfig(mode=mode, batched=batched))
        ranges = [slice(p.fragments[rank].start, p.fragments[rank].stop) for p in stored]
        mine = [x.flatten()[r] for x, r in zip(full, ranges, strict=True)]
        for p, got, want, r in zip(stored, engine.updates(mine), wants, ranges, strict=True):
            piece = want.flatten()[r]
            # float32 rounding of sums in another order; see test_tp_modes
            assert (got - piece).norm() < 2e-6 * want.norm(), (mode, p.name)
            if not batched and mode in ("duplicated", "exchange"):
                assert torch.equal(got, piece), (mode, p.name)


def parameter(**attributes):
    param = torch.nn.Parameter(torch.zeros(4, 4))
    for name, value in attributes.items():
        setattr(param, name, value)
    return param


@on_ranks(2)
def test_which_group_cuts_a_parameter():
    """Check the dimension that is cut, and whether both ranks share it, or the rows beside it."""
    cut = parameter(partition_dim=0, tensor_model_parallel=True)
    with pytest.raises(ConfigurationError, match="pg_collection"):
        partition_dim_and_group(cut, None, "auto")
    assert partition_dim_and_group(cut, None, "blockwise") == (-1, None)
    with pytest.raises(ConfigurationError, match="gtp_remat"):
        row_group(parameter(is_gtp_weight_remat=True), None, "auto")
    groups = [dist.new_group([0]), dist.new_group([1])]
    alone = groups[dist.get_rank()]
    both = dist.group.WORLD
    collection = SimpleNamespace(tp=both, expt_tp=alone, gtp_remat=alone, expt_gtp_remat=both)
    for param, expected in (
        (parameter(partition_dim=1), (1, True, False)),
        # experts, by either name
        (parameter(partition_dim=1, allreduce=False), (-1, False, False)),
        (parameter(partition_dim=1, expert_tp=True), (-1, False, False)),
        (parameter(partition_dim=-1), (-1, False, False)),
        # Transformer Engine's duplicate
        (parameter(partition_dim=0, tensor_model_parallel=False), (-1, False, False)),
        # rematerialized: over one rank, and an expert
        (parameter(partition_dim=0, is_gtp_weight_remat=True), (0, True, False)),
        (parameter(is_gtp_weight_remat=True, allreduce=False), (-1, False, True)),
    ):
        dim, group = partition_dim_and_group(param, collection, "auto")
        rows = row_group(param, collection, "auto")
        assert (dim, group is both, rows is both) == expected, vars(param)


@pytest.mark.parametrize(
    ("rows", "padding", "fits"), [(4, 0, True), (5, 2, True), (5, 0, False), (3, 0, False)]
)
def test_a_tensor_has_its_matrices_and_padding_and_nothing_else(rows, padding, fits):
    stored = whole((4, 2)), (Layout.whole((4, 2), 0),)
    expected = nullcontext() if fits else pytest.raises(ConfigurationError, match="covers 8")
    with expected:
        ParamShard("w", torch.zeros(rows, 2), *stored, shape=(rows, 2), padding=padding)


@pytest.mark.parametrize("grows", [False, True])
def test_where_nothing_is_sent_waves_grow_to_a_share_of_all_matrices(grows):
    shards = [
        StoredParameter(str(n), whole((32, 32)), -1, 1, (Fragment(0, 0, 1024),)).shard()
        for n in range(8)
    ]
    small = ExchangeConfig(matrix_buffer_mb=1024 * 4 / 2**20, grows=grows)
    waves = MatrixExchange(shards, newton_schulz(), small).waves
    assert [len(wave) for wave in waves] == ([2] * 4 if grows else [1] * 8)
    large = ExchangeConfig(matrix_buffer_mb=1.0, grows=grows)
    assert len(MatrixExchange(shards, newton_schulz(), large).waves) == 1
