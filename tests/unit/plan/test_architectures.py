"""Published models have the published sizes, and what cannot be built is refused."""

import argparse
from dataclasses import replace

import pytest

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.plan.architectures import PUBLISHED, Architecture, Experts, LatentAttention
from megatron_eopt.plan.sources import add_flags, from_flags

TOTALS = {
    "Llama-3-8B": 8.03e9,
    "Llama-3-70B": 70.6e9,
    "Llama-3-405B": 405.85e9,
    "Qwen3-30B-A3B": 30.5e9,
    "Qwen3-235B-A22B": 235e9,
    "DeepSeek-V3": 671e9,
    "Kimi-K2": 1.03e12,
}
ACTIVE = {
    "Qwen3-30B-A3B": 3.3e9,
    "Qwen3-235B-A22B": 22e9,
    "DeepSeek-V3": 37e9,
    "Kimi-K2": 32e9,
}


@pytest.mark.parametrize("name", TOTALS)
def test_totals_are_the_published_ones(name):
    assert PUBLISHED[name].total_parameters == pytest.approx(TOTALS[name], rel=0.01)
    assert PUBLISHED.keys() == TOTALS.keys()


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_the_published_ones(name):
    # published counts have the embedding, which no token is multiplied by; norms are too small
    shape = PUBLISHED[name]
    counted = shape.active_parameters + shape.vocab_size * shape.hidden_size
    assert counted == pytest.approx(ACTIVE[name], rel=0.05)


def test_a_dense_model_multiplies_by_all_matrices_but_the_embedding():
    shape = PUBLISHED["Llama-3-8B"]
    vectors = (2 * 32 + 1) * 4096
    assert shape.active_parameters == shape.total_parameters - vectors - 128256 * 4096
    tied = replace(shape, untied=False)
    assert tied.active_parameters == shape.active_parameters
    assert tied.total_parameters == shape.total_parameters - 128256 * 4096


SMALL = {"num_layers": 6, "hidden_size": 96, "num_attention_heads": 8, "vocab_size": 128}


def parsed(text: str) -> Architecture:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return from_flags(vars(parser.parse_args(text.split())))


def test_flags_have_megatrons_defaults():
    expected = Architecture("flags", 6, 96, 384, 8, 8, 12, 128, gated=False, untied=False)
    assert from_flags(SMALL) == expected
    text = "--num-layers 6 --hidden-size 96 --num-attention-heads 8 --vocab-size 128"
    assert parsed(text) == expected
    # int((4 * 96 * 2 / 3) / 64) * 64
    assert parsed(f"{text} --swiglu").ffn_hidden_size == 256
    assert parsed(f"{text} --group-query-attention").num_query_groups == 1
    # what Megatron's own namespace holds without these flags
    assert from_flags(SMALL | {"num_query_groups": 1, "kv_lora_rank": 32, "lr": 1.0}) == expected
    latent = LatentAttention(None, 32, 128, 64, 128)
    assert parsed(f"{text} --multi-latent-attention").latent == latent
    assert parsed(f"{text} --num-experts 4").experts == Experts(4, 384, 2)


def test_flags_describe_a_published_model():
    text = (
        "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128"
        " --kv-channels 128 --vocab-size 129280 --swiglu --untie-embeddings-and-output-weights"
        " --qk-layernorm --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512"
        " --num-experts 256 --moe-ffn-hidden-size 2048 --moe-router-topk 8"
        " --moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58)"
    )
    assert replace(parsed(text), name="DeepSeek-V3") == PUBLISHED["DeepSeek-V3"]


@pytest.mark.parametrize(
    ("given", "layers"),
    [("2", "101010"), ("([0]*1+[1]*2)*2", "011011"), ("[0,1,1,1,1,1]", "011111")],
)
def test_spellings_of_layers_with_experts(given, layers):
    text = "--num-layers 6 --hidden-size 96 --num-attention-heads 8 --vocab-size 128"
    shape = parsed(f"{text} --num-experts 4 --moe-layer-freq {given}")
    assert "".join(map(str, map(int, shape.moe_layers))) == layers


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"num_layers": None}, "--num-layers=None"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"group_query_attention": True, "num_query_groups": 3}, "num_query_groups=3"),
        ({"multi_latent_attention": True, "add_qkv_bias": True}, "add_qkv_bias=True"),
        ({"num_experts": 4, "moe_router_topk": 5}, "moe_router_topk=5"),
        ({"num_experts": 4, "moe_layer_freq": [1] * 5}, "moe_layer_freq=(1, 1"),
    ],
)
def test_flags_that_do_not_go_together(flags, named):
    with pytest.raises(ConfigurationError) as refused:
        from_flags(SMALL | flags)
    assert named in str(refused.value)
