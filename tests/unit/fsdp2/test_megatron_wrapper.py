"""The optimizer of a model in megatron-core's ``TorchFullyShardedDataParallel``."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import TorchFullyShardedDataParallel
from megatron.core.distributed.torch_fully_sharded_data_parallel_config import (
    TorchFullyShardedDataParallelConfig,
)
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron_eopt import ConfigurationError, get_megatron_optimizer
from megatron_eopt.math.finite import NonFiniteError
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import tiny_gpt
from tests.unit.fsdp2.model import config, shard


def build(vocabulary=128, **fields):
    model = tiny_gpt(layers=1, vocabulary=vocabulary, transformer_impl="local")
    wrapped = TorchFullyShardedDataParallel(
        model.config, TorchFullyShardedDataParallelConfig(), model
    )
    return wrapped, get_megatron_optimizer(config(**fields), [wrapped])


def set_gradients(model, value=1e-2):
    for param in model.parameters():
        param.grad = shard(torch.full(param.shape, value), param)


def says(action):
    """Return what an action raises."""
    with pytest.raises((ConfigurationError, NonFiniteError)) as caught:
        action()
    return str(caught.value)


def observe():
    initialize_megatron()
    model, optimizer = build(clip_grad=1.0)
    assert isinstance(optimizer, ChainedOptimizer)
    set_gradients(model)
    numel = sum(param.numel() for param in model.parameters())
    before = [param.full_tensor().clone() for param in model.parameters()]
    success, norm, zeros = optimizer.step()
    moved = [
        not torch.equal(a, p.full_tensor()) for a, p in zip(before, model.parameters(), strict=True)
    ]
    set_gradients(model)
    first = next(model.parameters()).grad.to_local()
    if dist.get_rank() == 0:
        first.view(-1)[0] = torch.nan
    saving = {"muon": {}, "soap": {"optimizer": "soap"}}
    saving["normuon"] = {
        "optimizer": "adaptive_muon",
        "adaptive_muon_moment2_method": "normuon",
    }
    refusals = {"nan": says(optimizer.step)}
    refusals["storage"] = says(lambda: build(use_distributed_optimizer=True))
    for name, fields in saving.items():
        vocabulary = 127 if name == "muon" else 128
        other, its = build(vocabulary, **fields)
        entries = other.state_dict()
        refusals[name] = says(lambda its=its, entries=entries: its.sharded_state_dict(entries))
    return success, float(norm), numel, zeros, all(moved), refusals


def test_it_behaves_like_megatrons_own():
    for success, norm, numel, zeros, moved, refusals in run_ranks(2, observe, timeout=120):
        assert success
        assert norm == pytest.approx(1e-2 * numel**0.5, rel=1e-5)
        assert not zeros
        assert moved
        assert "embedding" in refusals["nan"]
        assert "use_distributed_optimizer" in refusals["storage"]
        assert "must divide by 2" in refusals["muon"]
        assert "--no-save-optim" in refusals["soap"]
        assert "--no-save-optim" in refusals["normuon"]
