"""Shapes of decoder-only language models, from Megatron's flags.

All that decides weights is here, with these choices made: norms are RMSNorm, positions are rotary,
and no linear layer has a bias except, if asked for, that of Q, K and V. Layers that predict further
tokens are left out.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.training.arguments import moe_freq_type

from megatron_eopt.base.errors import ConfigurationError

SEQ_LENGTH = 4096
"""Tokens of a sequence where nothing says otherwise."""


@dataclass(frozen=True)
class Architecture:
    """A decoder-only language model."""

    name: str  # for people
    vocab_size: int  # rows of the embedding, padding included
    # its layers, as fields of Megatron's ``TransformerConfig``; of its ``MLATransformerConfig`` if
    # ``kv_lora_rank`` is among them
    fields: Mapping[str, Any]
    untied: bool = True  # whether the output layer has a weight of its own
    seq_length: int = SEQ_LENGTH  # tokens of a sequence in training. No weight depends on it

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        layers: int = self.fields["num_layers"]
        every = self.fields.get("moe_layer_freq", 1)
        if "num_moe_experts" not in self.fields:
            return (False,) * layers
        if isinstance(every, int):
            return tuple(layer % every == 0 for layer in range(layers))
        return tuple(map(bool, every))


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
_NAMES = (*_FLAGS, *_SWITCHES, "moe-layer-freq")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add Megatron's flags of an architecture to a parser; :func:`from_flags` takes the values."""
    group = parser.add_argument_group("architecture, in Megatron's flags")
    for name, text in _FLAGS.items():
        group.add_argument(f"--{name}", type=int, metavar="N", help=text)
    for name, text in _SWITCHES.items():
        group.add_argument(f"--{name}", action="store_true", default=None, help=text)
    text = 'every how manieth layer has experts (1), or a list: "[0]*3+[1]*58"'
    group.add_argument("--moe-layer-freq", type=moe_freq_type, metavar="N", help=text)


def flags_among(words: Sequence[str]) -> dict[str, Any]:
    """Return the flags of an architecture among a command line's, by Megatron's names."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    found = vars(parser.parse_known_args(words)[0])
    return {name: value for name, value in found.items() if value is not None}


def from_flags(flags: Mapping[str, Any], name: str = "flags") -> Architecture:
    """Return the architecture that Megatron's trainer builds from its flags.

    Args:
        flags: Values by Megatron's names, with underscores. What is missing or None has Megatron's
            default; others' flags may be among them.
        name: Of the architecture, for people.

    Raises:
        ConfigurationError: If a flag is missing.
    """
    offered = [flag.replace("-", "_") for flag in _NAMES]
    given = {flag: flags[flag] for flag in offered if flags.get(flag) is not None}
    for needed in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        if needed not in given:
            flag = "--" + needed.replace("_", "-")
            raise ConfigurationError(flag, None, "is missing", "Pass it, or --model")
    hidden, gated = given["hidden_size"], given.get("swiglu", False)
    # gated MLPs have three matrices, about as large as the two of others; a multiple of 64
    inner = hidden * 8 // (3 * 64) * 64 if gated else 4 * hidden
    fields: dict[str, Any] = {"gated_linear_unit": gated, "ffn_hidden_size": inner}
    kind = TransformerConfig
    if given.get("multi_latent_attention"):
        # of which the configuration has other defaults than the flags
        fields |= {"q_lora_rank": None, "kv_lora_rank": 32}
        kind = MLATransformerConfig
    named = {field.name for field in dataclasses.fields(kind)} - {"num_query_groups"}
    fields |= {field: value for field, value in given.items() if field in named}
    if given.get("group_query_attention"):
        fields["num_query_groups"] = given.get("num_query_groups", 1)
    if "num_experts" in given:
        fields["num_moe_experts"] = given["num_experts"]
    untied = given.get("untie_embeddings_and_output_weights", False)
    seq_length = given.get("seq_length", SEQ_LENGTH)
    return Architecture(name, given["vocab_size"], fields, untied, seq_length)
