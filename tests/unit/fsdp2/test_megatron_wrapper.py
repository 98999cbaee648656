"""The optimizer of a model in megatron-core's ``TorchFullyShardedDataParallel``."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron_eopt import ConfigurationError, get_megatron_optimizer
from megatron_eopt.base.errors import NonFiniteError
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import tiny_gpt, wrap_fsdp2
from tests.unit.fsdp2.model import config, shard


def build(**fields):
    model = tiny_gpt(layers=1, vocabulary=128, transformer_impl="local")
    if fields.get("bf16"):
        model.bfloat16()
    wrapped = wrap_fsdp2(model)
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
    refusals = {"nan": says(optimizer.step)}
    # torch cuts state, whatever the configuration says of Megatron's buffers
    fields = {"bf16": True, "params_dtype": torch.bfloat16, "use_distributed_optimizer": True}
    inner = build(**fields)[1].chained_optimizers[0].optimizer
    gone = {**inner.state_dict(), "state": {}}
    refusals["gone"] = says(lambda: inner.load_state_dict(gone))
    return success, float(norm), numel, zeros, all(moved), refusals


def test_it_behaves_like_megatrons_own():
    for success, norm, numel, zeros, moved, refusals in run_ranks(2, observe, timeout=120):
        assert success
        assert norm == pytest.approx(1e-2 * numel**0.5, rel=1e-5)
        assert not zeros
        assert moved
        assert "embedding" in refusals["nan"]
        # main copies require no gradients, and are not frozen
        assert "momentum_buffer" in refusals["gone"]
