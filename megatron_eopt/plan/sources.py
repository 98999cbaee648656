"""An architecture from Megatron's flags."""

import argparse
from collections.abc import Mapping
from typing import Any

from megatron.training.arguments import moe_freq_type

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.plan.architectures import SEQ_LENGTH, Architecture, Experts, LatentAttention

__all__ = ["add_flags", "from_flags", "refuse_flags"]

_FLAGS = {
    "num-layers": "transformer layers",
    "hidden-size": "size of a token's vector",
    "ffn-hidden-size": "inner size of a dense MLP (4 times the hidden size, or 8/3 times if gated)",
    "num-attention-heads": "heads of the queries",
    "num-query-groups": "heads of keys and values with --group-query-attention (1)",
    "kv-channels": "size of a head (the hidden size over the heads)",
    "vocab-size": "rows of the embedding, padding included",
    "seq-length": f"tokens of a sequence ({SEQ_LENGTH})",
    "q-lora-rank": "rank of latent queries (none)",
    "kv-lora-rank": "rank of latent keys and values (32)",
    "qk-head-dim": "part of a latent head without position (128)",
    "qk-pos-emb-head-dim": "part of a latent head with position (64)",
    "v-head-dim": "size of a latent head's value (128)",
    "num-experts": "routed experts of a layer",
    "moe-ffn-hidden-size": "inner size of an expert (that of a dense MLP)",
    "moe-router-topk": "experts that a token passes (2)",
    "moe-shared-expert-intermediate-size": "inner size of all shared experts together",
}
_SWITCHES = {
    "group-query-attention": "share keys and values among heads",
    "multi-latent-attention": "make queries, keys and values from vectors of low rank",
    "swiglu": "gated MLPs",
    "add-qkv-bias": "biases of queries, keys and values",
    "qk-layernorm": "norms of queries and keys",
    "untie-embeddings-and-output-weights": "give the output layer a weight of its own",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add Megatron's flags of an architecture to a parser, in a group of their own.

    Args:
        parser: Gets them; what it parses, as a mapping, is what :func:`from_flags` takes.
    """
    group = parser.add_argument_group("architecture, in Megatron's flags")
    for name, text in _FLAGS.items():
        group.add_argument(f"--{name}", type=int, metavar="N", help=text)
    for name, text in _SWITCHES.items():
        group.add_argument(f"--{name}", action="store_true", help=text)
    text = 'every how manieth layer has experts (1), or a list: "[0]*3+[1]*58"'
    group.add_argument("--moe-layer-freq", type=moe_freq_type, metavar="N", help=text)


def refuse_flags(flags: Mapping[str, Any], source: str) -> None:
    """Refuse flags of :func:`add_flags` beside another source of an architecture.

    Raises:
        ConfigurationError: If one of them was given.
    """
    for name in (*_FLAGS, *_SWITCHES, "moe-layer-freq"):
        value = flags.get(name.replace("-", "_"))
        # 0 was given, and equals False
        if value is not None and value is not False:
            rule = f"has no meaning beside {source}, which says all of the architecture"
            raise ConfigurationError(f"--{name}", value, rule, "Leave one of the two out")


def from_flags(flags: Mapping[str, Any], *, name: str = "flags") -> Architecture:
    """Return the architecture that Megatron's trainer builds from its flags.

    Args:
        flags: Values by Megatron's names, with underscores. What is missing or None has Megatron's
            default; others' flags may be among them.
        name: The architecture's.

    Raises:
        ConfigurationError: If a flag is missing, or two do not go together.
    """
    for field in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        if flags.get(field) is None:
            flag = "--" + field.replace("_", "-")
            raise ConfigurationError(flag, None, "is missing", "Pass it, or --model")

    def value(field: str, default: int) -> int:
        given: int | None = flags.get(field)
        return default if given is None else given

    hidden, heads = flags["hidden_size"], flags["num_attention_heads"]
    gated, grouped = bool(flags.get("swiglu")), bool(flags.get("group_query_attention"))
    # gated MLPs have three matrices, about as large as the two of others; a multiple of 64
    inner = value("ffn_hidden_size", hidden * 8 // (3 * 64) * 64 if gated else 4 * hidden)
    latent, experts = None, None
    if flags.get("multi_latent_attention"):
        latent = LatentAttention(
            q_lora_rank=flags.get("q_lora_rank"),
            kv_lora_rank=value("kv_lora_rank", 32),
            qk_head_dim=value("qk_head_dim", 128),
            qk_pos_emb_head_dim=value("qk_pos_emb_head_dim", 64),
            v_head_dim=value("v_head_dim", 128),
        )
    if flags.get("num_experts") is not None:
        every = flags.get("moe_layer_freq")
        experts = Experts(
            num_moe_experts=flags["num_experts"],
            moe_ffn_hidden_size=value("moe_ffn_hidden_size", inner),
            moe_router_topk=value("moe_router_topk", 2),
            moe_shared_expert_intermediate_size=flags.get("moe_shared_expert_intermediate_size"),
            moe_layer_freq=tuple(every) if isinstance(every, list) else every or 1,
        )
    return Architecture(
        name=name,
        num_layers=flags["num_layers"],
        hidden_size=hidden,
        ffn_hidden_size=inner,
        num_attention_heads=heads,
        num_query_groups=value("num_query_groups", 1) if grouped else heads,
        kv_channels=value("kv_channels", hidden // max(heads, 1)),
        vocab_size=flags["vocab_size"],
        gated=gated,
        untied=bool(flags.get("untie_embeddings_and_output_weights")),
        add_qkv_bias=bool(flags.get("add_qkv_bias")),
        qk_layernorm=bool(flags.get("qk_layernorm")),
        latent=latent,
        experts=experts,
        seq_length=value("seq_length", SEQ_LENGTH),
    )
