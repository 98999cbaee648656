"""The optimizer of a model in megatron-core's ``TorchFullyShardedDataParallel``."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron_eopt import ConfigurationError, get_megatron_optimizer
from megatron_eopt.base.errors import NonFiniteError
from tests.harness.each_rank import on_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import tiny_gpt, wrap_fsdp2
from tests.unit.fsdp2.models import config, shard


def build(**fields):
    model = tiny_gpt(layers=1, vocabulary=128, transformer_impl="local")
    if fields.get("bf16"):
        model.bfloat16()
    wrapped = wrap_fsdp2(model)
    return wrapped, get_megatron_optimizer(config(**fields), [wrapped])


def set_gradients(model, value=1e-2):
    for param in model.parameters():
        param.grad = shard(torch.full(param.shape, value), param)


@on_ranks(2, timeout=120)
def test_it_behaves_like_megatrons_own():
    initialize_megatron()
    model, optimizer = build(clip_grad=1.0)
    assert isinstance(optimizer, ChainedOptimizer)
    set_gradients(model)
    numel = sum(param.numel() for param in model.parameters())
    before = [param.full_tensor().clone() for param in model.parameters()]
    success, norm, zeros = optimizer.step()
    assert success
    assert norm == pytest.approx(1e-2 * numel**0.5, rel=1e-5), norm
    assert not zeros
    for old, param in zip(before, model.parameters(), strict=True):
        assert not torch.equal(old, param.full_tensor())
    set_gradients(model)
    first = next(model.parameters()).grad.to_local()
    if dist.get_rank() == 0:
        first.view(-1)[0] = torch.nan
    with pytest.raises(NonFiniteError, match="embedding"):
        optimizer.step()
    # torch cuts state, whatever the configuration says of Megatron's buffers
    fields = {"bf16": True, "params_dtype": torch.bfloat16, "use_distributed_optimizer": True}
    inner = build(**fields)[1].chained_optimizers[0].optimizer
    gone = {**inner.state_dict(), "state": {}}
    # main copies require no gradients, and are not frozen
    with pytest.raises(ConfigurationError, match="momentum_buffer"):
        inner.load_state_dict(gone)
