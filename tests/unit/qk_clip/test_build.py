"""What is recorded, and what is refused when the optimizer is built."""

import functools
import math
from typing import Any

import pytest
import torch
from torch import nn

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig, get_megatron_optimizer
from megatron_eopt.qk_clip import clip_qk
from megatron_eopt.qk_clip.attention import attentions
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import synthetic_batch, tiny_gpt, train_step, wrap_fsdp2
from tests.unit.fsdp2.models import eager, shard, whole
from tests.unit.qk_clip.test_clip import GROUPED, LATENT, MODEL, deviation
from tests.unit.storage.full_state import Case, build
from tests.unit.storage.runs import Result, Slab, make_chunk


@on_ranks(1)
def test_what_cannot_be_clipped_is_refused_when_built():
    offloaded = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    case = Case("adam", {**GROUPED, **MODEL}, config=offloaded)
    text = "optimizer_cpu_offload keeps main weights inside megatron-core's hybrid"
    with pytest.raises(ConfigurationError, match=text):
        build(case)
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.01, use_distributed_optimizer=True)
    for model, name, module, text in (
        (GROUPED, "q_layernorm", nn.LayerNorm(8), "before a norm of queries and keys"),
        (GROUPED, "core_attention", nn.Identity(), "SelfAttention with Identity does not record"),
        (LATENT, "linear_kv_up_proj.weight.requires_grad", False, "some are frozen"),
    ):
        chunk = make_chunk(Case("muon", {**model, **MODEL}).run)
        *path, last = name.split(".")
        setattr(functools.reduce(getattr, path, next(attentions(chunk))), last, module)
        with pytest.raises(ConfigurationError, match=text):
            get_megatron_optimizer(config, [chunk])


@pytest.mark.parametrize("model", [GROUPED, LATENT], ids=["GQA", "MLA"])
@on_ranks(1)
def test_local_attention_records_the_largest_logit_of_each_head(model):
    """Compare what attention records in two microbatches with float64 maxima of its inputs."""
    chunk, optimizer = build(Case("muon", {**model, **MODEL}))
    expected: dict[int, torch.Tensor] = {}

    def look(attention: Any, core: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        query, key = (args[n] if len(args) > n else None for n in (0, 1))
        query, key = query.double(), key.double()
        key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
        scores = torch.einsum("qbnd,kbnd->bnqk", query, key) * core.softmax_scale
        scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1).bool(), -math.inf)
        found = scores.amax((0, 2, 3))
        number = attention.layer_number
        expected[number] = torch.maximum(expected.get(number, found), found)

    for attention in attentions(chunk):
        hook = functools.partial(look, attention)
        attention.core_attention.register_forward_pre_hook(hook, with_kwargs=True)
    for seed in range(2):
        train_step([chunk], optimizer, [synthetic_batch(2 * seed), synthetic_batch(2 * seed + 1)])
        mine = [a.core_attention.current_max_attn_logits for a in attentions(chunk)]
        chunk.eval()
        assert clip_qk([chunk], log_max_only=True) == max(float(m.max()) for m in mine)
        chunk.train()
        for attention, logits in zip(attentions(chunk), mine, strict=True):
            assert logits.shape == (4,)
            # float32 products of at most 32 terms
            exact = expected.pop(attention.layer_number)
            torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-6)


@eager
def of_dtensors(dtype: torch.dtype) -> Result:
    """Step, clip and step a model of torch FSDP2; return its weights."""
    initialize_megatron()
    torch.manual_seed(0)
    model = tiny_gpt(**{**GROUPED, **MODEL, "transformer_impl": "local", "dtype": dtype})
    wrapped = wrap_fsdp2(model)
    bf16 = dtype == torch.bfloat16
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.01, clip_grad=0.0, bf16=bf16)
    optimizer = get_megatron_optimizer(config, [wrapped])
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    for step in range(2):
        for number, param in enumerate(wrapped.parameters()):
            generator = torch.Generator().manual_seed(100 * step + number)
            value = torch.randn(param.shape, generator=generator)
            param.grad = shard(value.to(dtype), param)
        optimizer.step()
        for attention in attentions(wrapped):
            attention.core_attention.current_max_attn_logits = torch.tensor([5.0, 20.0, 9.0, 40.0])
        assert clip_qk([wrapped]) == 40.0
    uncut = Slab(-1, 0, 1, 1)
    return Result({name: (uncut, whole(p)) for name, p in wrapped.named_parameters()}, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shards_of_torch_fsdp2_are_clipped_as_one_process_does(dtype):
    expected = run_ranks(1, of_dtensors, dtype, timeout=120)[0]
    found = run_ranks(2, of_dtensors, dtype, timeout=120)
    assert deviation(found, expected) < (2e-6 if dtype == torch.float32 else 2e-2)
