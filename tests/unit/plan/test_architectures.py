"""Published models have the published sizes, and flags mean what they mean to the trainer."""

import argparse
from dataclasses import replace

import pytest

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.plan.architectures import PUBLISHED, Architecture, add_flags, from_flags
from megatron_eopt.plan.model import Layout, train_flops, transformer_config

ACTIVE = {
    "Llama-3-8B": 8.03e9,
    "Llama-3-70B": 70.6e9,
    "Llama-3-405B": 405.85e9,
    "Qwen3-30B-A3B": 3.3e9,
    "Qwen3-235B-A22B": 22e9,
    "DeepSeek-V3": 37e9,
    "Kimi-K2": 32e9,
}


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_the_published_ones(name):
    # of one token alone attention takes next to nothing; counts have the embedding, which no token
    # is multiplied by
    shape = replace(PUBLISHED[name], seq_length=1)
    embedding = shape.vocab_size * shape.fields["hidden_size"]
    assert train_flops(shape, 1) / 6 + embedding == pytest.approx(ACTIVE[name], rel=0.05)
    assert PUBLISHED.keys() == ACTIVE.keys()


SMALL = {"num_layers": 6, "hidden_size": 96, "num_attention_heads": 8, "vocab_size": 128}
TEXT = "--num-layers 6 --hidden-size 96 --num-attention-heads 8 --vocab-size 128"


def parsed(text: str) -> Architecture:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return from_flags(vars(parser.parse_args(text.split())))


def layers(architecture: Architecture) -> dict[str, object]:
    """Return megatron-core's configuration as plain values, those that it fills in among them."""
    return vars(transformer_config(architecture, Layout()))


def test_flags_have_megatrons_defaults():
    expected = {"ffn_hidden_size": 384, "num_query_groups": 8, "kv_channels": 12}
    for shape in (from_flags(SMALL), parsed(TEXT), from_flags(SMALL | {"num_query_groups": 1})):
        assert expected.items() <= layers(shape).items()
        assert (shape.vocab_size, shape.untied) == (128, False)
    # int((4 * 96 * 2 / 3) / 64) * 64
    assert layers(parsed(f"{TEXT} --swiglu"))["ffn_hidden_size"] == 256
    assert layers(parsed(f"{TEXT} --group-query-attention"))["num_query_groups"] == 1
    latent = {"q_lora_rank": None, "kv_lora_rank": 32, "qk_head_dim": 128, "v_head_dim": 128}
    found = layers(parsed(f"{TEXT} --multi-latent-attention"))
    assert (latent | {"qk_pos_emb_head_dim": 64}).items() <= found.items()
    experts = {"num_moe_experts": 4, "moe_ffn_hidden_size": 384, "moe_router_topk": 2}
    assert experts.items() <= layers(parsed(f"{TEXT} --num-experts 4")).items()


def test_flags_describe_a_published_model():
    text = (
        "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128"
        " --kv-channels 128 --vocab-size 129280 --swiglu --untie-embeddings-and-output-weights"
        " --qk-layernorm --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512"
        " --num-experts 256 --moe-ffn-hidden-size 2048 --moe-router-topk 8"
        " --moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58)"
    )
    found, expected = layers(parsed(text)), layers(PUBLISHED["DeepSeek-V3"])
    # made anew for each configuration
    functions = {name for name, value in expected.items() if callable(value)}
    assert {n: v for n, v in found.items() if n not in functions} == {
        n: v for n, v in expected.items() if n not in functions
    }


@pytest.mark.parametrize(
    ("given", "layers"),
    [("2", "101010"), ("([0]*1+[1]*2)*2", "011011"), ("[0,1,1,1,1,1]", "011111")],
)
def test_spellings_of_layers_with_experts(given, layers):
    shape = parsed(f"{TEXT} --num-experts 4 --moe-layer-freq {given}")
    assert "".join(map(str, map(int, shape.moe_layers))) == layers


def test_a_missing_flag_is_named():
    with pytest.raises(ConfigurationError, match="--num-layers=None"):
        from_flags(SMALL | {"num_layers": None})
