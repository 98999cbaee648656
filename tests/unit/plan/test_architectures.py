"""Published models have the published sizes, and flags mean what they mean to the trainer."""

import argparse
from dataclasses import replace

import pytest
import torch
from transformers import GlmMoeDsaConfig
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.tools.plan.architectures import Architecture, add_flags, from_flags
from megatron_eopt.tools.plan.model import ParallelLayout, train_flops, transformer_config
from megatron_eopt.tools.recipe import recipe

ACTIVE = {
    "llama-3-8b": 8.03e9,
    "qwen3-235b-a22b": 22e9,
    "deepseek-v3": 37e9,
    "kimi-k2": 32.6e9,
    "moonlight": 2.24e9 + 2 * 163840 * 2048,  # published without embedding and output layer
}


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_the_published_ones(name):
    # of one token alone attention takes next to nothing; counts have the embedding, which no token
    # is multiplied by
    shape = replace(recipe(name).architecture(), seq_length=1)
    embedding = shape.vocab_size * shape.fields["hidden_size"]
    assert train_flops(shape, 1) / 6 + embedding == pytest.approx(ACTIVE[name], rel=0.05)


SMALL = {"num_layers": 6, "hidden_size": 96, "num_attention_heads": 8, "vocab_size": 128}
TEXT = "--num-layers 6 --hidden-size 96 --num-attention-heads 8 --vocab-size 128"


def parsed(text: str) -> Architecture:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return from_flags(vars(parser.parse_args(text.split())))


def layers(architecture: Architecture) -> dict[str, object]:
    """Return megatron-core's configuration as plain values, those that it fills in among them."""
    return vars(transformer_config(architecture, ParallelLayout()))


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


def test_sizes_of_glm_are_those_of_transformers():
    one = recipe("glm-5.2")
    ours, theirs = one.architecture(), GlmMoeDsaConfig(index_topk_freq=4, index_skip_topk_offset=3)
    names = {
        "num_layers": "num_hidden_layers",
        "ffn_hidden_size": "intermediate_size",
        "num_moe_experts": "n_routed_experts",
        "moe_ffn_hidden_size": "moe_intermediate_size",
        "moe_router_topk": "num_experts_per_tok",
        "qk_head_dim": "qk_nope_head_dim",
        "qk_pos_emb_head_dim": "qk_rope_head_dim",
    }
    for name in (*names, "hidden_size", "q_lora_rank", "kv_lora_rank", "v_head_dim"):
        assert ours.fields[name] == getattr(theirs, names.get(name, name)), name
    assert ours.fields["num_attention_heads"] == theirs.num_attention_heads
    assert ours.vocab_size == theirs.vocab_size
    assert ours.moe_layers == tuple(kind == "sparse" for kind in theirs.mlp_layer_types)
    with torch.device("meta"):
        indexer = GlmMoeDsaIndexer(theirs, 0)
    full = theirs.indexer_types.count("full")
    billions = full * sum(param.numel() for param in indexer.parameters()) / 1e9
    assert f"{billions:.1f} billion weights in {full} of 78 layers" in one.left_out[0]
