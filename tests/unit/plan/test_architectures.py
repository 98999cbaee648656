"""Published models have the published sizes, and what cannot be built is refused."""

import argparse
import json
from dataclasses import replace
from typing import Any

import pytest

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.plan.architectures import PUBLISHED, Architecture, Experts, LatentAttention
from megatron_eopt.plan.sources import add_flags, from_flags, from_hugging_face

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
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rope_scaling": None,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
KIMI = DEEPSEEK | {
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "vocab_size": 163840,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
}
DENSE = {key: value for key, value in LLAMA.items() if key != "model_type"}
FILES: dict[str, tuple[dict[str, Any], float]] = {
    "Llama-2-7B": (
        LLAMA | {"intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32000},
        6.738e9,
    ),
    "Mistral-7B-v0.1": (LLAMA | {"model_type": "mistral", "vocab_size": 32000}, 7.242e9),
    "Mixtral-8x7B-v0.1": (
        LLAMA
        | {
            "model_type": "mixtral",
            "vocab_size": 32000,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        46.70e9,
    ),
    "Qwen2.5-0.5B": (
        {
            "model_type": "qwen2",
            "num_hidden_layers": 24,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        0.4940e9,
    ),
    "Qwen3-0.6B": (
        {
            "model_type": "qwen3",
            "num_hidden_layers": 28,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        0.5960e9,
    ),
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


def written(folder: Any, values: Any, name: str = "model") -> Any:
    path = folder / name / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(values))
    return path


def plain(shape: Architecture) -> Architecture:
    """Return the same with the layers that have experts in one of their spellings."""
    if shape.experts is None:
        return shape
    layers = tuple(map(int, shape.moe_layers))
    return replace(shape, experts=replace(shape.experts, moe_layer_freq=layers))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Llama-3-8B", LLAMA),
        ("Qwen3-30B-A3B", QWEN3_MOE),
        ("DeepSeek-V3", DEEPSEEK),
        ("Kimi-K2", KIMI),
    ],
)
def test_a_published_file_is_the_model_of_that_name(tmp_path, name, values):
    length = PUBLISHED[name].seq_length
    shape = from_hugging_face(written(tmp_path, values, name), seq_length=length)
    assert plain(shape) == plain(PUBLISHED[name])
    assert from_hugging_face(tmp_path / name, seq_length=length) == shape


@pytest.mark.parametrize("name", FILES)
def test_other_published_files_have_the_published_totals(tmp_path, name):
    values, total = FILES[name]
    shape = from_hugging_face(written(tmp_path, values))
    assert shape.total_parameters == pytest.approx(total, rel=0.001)


def test_layers_without_experts_are_read(tmp_path):
    mixed = QWEN3_MOE | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    shape = from_hugging_face(written(tmp_path, mixed))
    assert shape.moe_layers == (False, True, False, False, False, True)
    mixed = DEEPSEEK | {"num_hidden_layers": 6, "moe_layer_freq": 2, "n_shared_experts": None}
    shape = from_hugging_face(written(tmp_path, mixed))
    assert shape.moe_layers == (False, False, False, False, True, False)
    assert shape.experts.moe_shared_expert_intermediate_size is None


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (LLAMA | {"model_type": "gpt2"}, "model_type='gpt2': must be one of llama, mistral"),
        (DENSE, "model_type=''"),
        ([LLAMA], "must hold fields by name"),
        (LLAMA | {"num_hidden_layers": None}, "num_hidden_layers=None"),
        (LLAMA | {"hidden_size": "4096"}, "hidden_size='4096'"),
        (LLAMA | {"vocab_size": 128256.0}, "vocab_size=128256.0"),
        (LLAMA | {"tie_word_embeddings": 1}, "tie_word_embeddings=1"),
        (LLAMA | {"attention_bias": True}, "attention_bias=True"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (LLAMA | {"num_key_value_heads": 5}, "num_query_groups=5"),
        (LLAMA | {"num_attention_heads": 48}, "num_attention_heads=48: must divide the hidden"),
        (LLAMA | {"model_type": "mistral", "num_key_value_heads": None}, "num_key_value_heads"),
        (LLAMA | {"model_type": "qwen3"}, "head_dim=None"),
        (LLAMA | {"model_type": "mixtral"}, "num_local_experts=None"),
        (QWEN3_MOE | {"mlp_only_layers": 3}, "mlp_only_layers=3"),
        (QWEN3_MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        (DEEPSEEK | {"kv_lora_rank": None}, "kv_lora_rank=None"),
        (DEEPSEEK | {"first_k_dense_replace": 61}, "moe_layer_freq="),
    ],
)
def test_files_that_are_not_served_are_refused_by_name(tmp_path, values, named):
    with pytest.raises(ConfigurationError) as refused:
        from_hugging_face(written(tmp_path, values))
    assert named in str(refused.value)


@pytest.mark.parametrize("text", [None, "no json"])
def test_files_that_cannot_be_read_are_refused(tmp_path, text):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        from_hugging_face(path)


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
    [
        (2, "101010"),
        ("3", "100100"),
        ("([0]*1+[1]*2)*2", "011011"),
        ([0, 1, 1, 1, 1, 1], "011111"),
    ],
)
def test_spellings_of_layers_with_experts(given, layers):
    shape = from_flags(SMALL | {"num_experts": 4, "moe_layer_freq": given})
    assert "".join(map(str, map(int, shape.moe_layers))) == layers


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"num_layers": None}, "--num-layers=None"),
        ({"hidden_size": "96"}, "--hidden-size='96'"),
        ({"num_layers": 0}, "--num-layers=0"),
        ({"swiglu": "yes"}, "--swiglu='yes'"),
        ({"num_attention_heads": 7}, "--num-attention-heads=7"),
        ({"group_query_attention": True, "num_query_groups": 3}, "num_query_groups=3"),
        ({"num_query_groups": 4}, "--num-query-groups=4"),
        ({"moe_ffn_hidden_size": 32}, "without --num-experts"),
        ({"q_lora_rank": 32}, "without --multi-latent-attention"),
        ({"multi_latent_attention": True, "add_qkv_bias": True}, "add_qkv_bias=True"),
        ({"num_experts": 4, "moe_router_topk": 5}, "moe_router_topk=5"),
        ({"num_experts": 4, "moe_layer_freq": 0}, "moe_layer_freq=0"),
        ({"num_experts": 4, "moe_layer_freq": "[0]*6"}, "moe_layer_freq=(0, 0"),
        ({"num_experts": 4, "moe_layer_freq": "[1]*5"}, "moe_layer_freq=(1, 1"),
        ({"num_experts": 4, "moe_layer_freq": "[2]*6"}, "moe_layer_freq=(2, 2"),
        ({"num_experts": 4, "moe_layer_freq": "[1"}, "--moe-layer-freq='[1'"),
        ({"num_experts": 4, "moe_layer_freq": "open('x')"}, "--moe-layer-freq"),
        ({"num_experts": 4, "moe_layer_freq": "[1]+6"}, "--moe-layer-freq"),
        ({"num_experts": 4, "moe_layer_freq": 0.5}, "--moe-layer-freq=0.5"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, named):
    with pytest.raises(ConfigurationError) as refused:
        from_flags(SMALL | flags)
    assert named in str(refused.value)
