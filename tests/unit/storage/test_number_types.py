"""Megatron's storages step float64 weights without rounding them, or refuse them by name."""

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import nn

from megatron_eopt.base.errors import ConfigurationError
from tests.harness import run_ranks
from tests.unit.fsdp2.models import eager, far
from tests.unit.storage.foreign import built, step, weights, wrapped


class Wide(MegatronModule):
    """A vector and a matrix of a given dtype beside ordinary ones."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1))
        torch.manual_seed(0)
        self.hidden = nn.Linear(6, 4)
        self.deep = nn.Linear(6, 4).to(dtype)


@eager
def trained(storage, dtype, fields=(), lr=0.02):
    """Return weights before and after some steps, or the error of the build."""
    model = Wide(dtype)
    before = weights(model)
    if fields:
        model.hidden.bfloat16()
    of_ddp = {"grad_reduce_in_fp32": bool(fields)}
    chunk = wrapped(storage, model, **(of_ddp if storage in ("replicated", "sharded") else {}))
    try:
        optimizer = built(storage, chunk, lr=lr, **dict(fields))
    except ConfigurationError as error:
        return str(error)
    step(storage, chunk, optimizer)
    return before, weights(chunk)


@pytest.mark.parametrize("storage", ["replicated", "fsdp2"])
def test_float64_keeps_its_digits(storage):
    (expected,) = run_ranks(1, trained, "replicated", torch.float32)
    for _, after in run_ranks(2, trained, storage, torch.float64):
        assert {param.dtype for param in after.values()} == {torch.float32, torch.float64}
        assert far({name: after[name].float() for name in after}, expected[1])[0] < 1e-6
    for before, after in run_ranks(2, trained, storage, torch.float64, (), 1e-30):
        assert all(torch.equal(before[name], after[name]) for name in before)


BF16 = (("bf16", True),)
REFUSED = [
    # Megatron-FSDP itself refuses both
    *((storage, torch.complex64, ()) for storage in ("replicated", "sharded", "fsdp2")),
    *((storage, torch.float64, BF16) for storage in ("replicated", "sharded", "fsdp2")),
    ("sharded", torch.float64, ()),
]


@pytest.mark.parametrize(("storage", "dtype", "fields"), REFUSED)
def test_other_dtypes_are_refused_by_name(storage, dtype, fields):
    for error in run_ranks(2, trained, storage, dtype, fields):
        assert f"deep.weight={dtype}" in error
