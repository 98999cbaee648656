"""Describe decoder-only language models by Megatron's flags.

All models have RMSNorm and rotary positions. Linear layers have no bias, except that of Q, K and V
with ``--add-qkv-bias``. :data:`LEFT_OUT` names what is not described.
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
"""Default sequence length in tokens."""

LEFT_OUT = {
    "mtp-num-layers": "multi-token prediction layers",
    "qk-clip": "QK-clip, which scales query and key weights after the step",
}
"""What flags of a model turn on that plans leave out."""


@dataclass(frozen=True)
class Architecture:
    """A decoder-only language model."""

    name: str  # shown in tables and errors
    vocab_size: int  # rows of the embedding, padding included
    # fields of Megatron's ``TransformerConfig``, or ``MLATransformerConfig`` with ``kv_lora_rank``
    fields: Mapping[str, Any]
    untied: bool = True  # whether the output layer has its own weight
    seq_length: int = SEQ_LENGTH  # tokens per training sequence; no weight depends on it

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it has experts."""
        layers: int = self.fields["num_layers"]
        every = self.fields.get("moe_layer_freq", 1)
        if "num_moe_experts" not in self.fields:
            return (False,) * layers
        if isinstance(every, int):
            return tuple(layer % every == 0 for layer in range(layers))
        return tuple(map(bool, every))


_FLAGS = {
    "num-layers": "transformer layers",
    "hidden-size": "hidden size",
    "ffn-hidden-size": "MLP hidden size (default: 4 x hidden size, 8/3 x with --swiglu)",
    "num-attention-heads": "attention heads",
    "num-query-groups": "key and value heads, with --group-query-attention (default: 1)",
    "kv-channels": "size of an attention head (default: hidden size / attention heads)",
    "vocab-size": "rows of the embedding, padding included",
    "seq-length": f"tokens per sequence (default: {SEQ_LENGTH})",
    "q-lora-rank": "MLA: rank of the query projection (default: no low-rank projection)",
    "kv-lora-rank": "MLA: rank of the key and value projection (default: 32)",
    "qk-head-dim": "MLA: size of a query or key head without rotary positions (default: 128)",
    "qk-pos-emb-head-dim": "MLA: size of its part with rotary positions (default: 64)",
    "v-head-dim": "MLA: size of a value head (default: 128)",
    "num-experts": "routed experts per MoE layer",
    "moe-ffn-hidden-size": "hidden size of an expert (default: that of a dense MLP)",
    "moe-router-topk": "experts per token (default: 2)",
    "moe-shared-expert-intermediate-size": "hidden size of all shared experts together",
}
_SWITCHES = {
    "group-query-attention": "use grouped-query attention",
    "multi-latent-attention": "use multi-latent attention (MLA)",
    "swiglu": "use gated MLPs",
    "add-qkv-bias": "add biases to the query, key and value projections",
    "qk-layernorm": "normalize queries and keys",
    "untie-embeddings-and-output-weights": "give the output layer its own weight",
}
_NAMES = (*_FLAGS, *_SWITCHES, "moe-layer-freq")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add Megatron's architecture flags to a parser; pass the values to :func:`from_flags`."""
    group = parser.add_argument_group("architecture (Megatron's flags)")
    for name, text in _FLAGS.items():
        group.add_argument(f"--{name}", type=int, metavar="N", help=text)
    for name, text in _SWITCHES.items():
        group.add_argument(f"--{name}", action="store_true", default=None, help=text)
    text = 'every Nth layer has experts (default: 1), or a list such as "[0]*3+[1]*58"'
    group.add_argument("--moe-layer-freq", type=moe_freq_type, metavar="N", help=text)


def flags_among(words: Sequence[str]) -> dict[str, Any]:
    """Return the architecture flags of a command line, by Megatron's names with underscores."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    parsed = vars(parser.parse_known_args(words)[0])
    return {name: value for name, value in parsed.items() if value is not None}


def from_flags(flags: Mapping[str, Any], name: str = "your model") -> Architecture:
    """Return the architecture that Megatron's trainer builds from its flags.

    Args:
        flags: Values by Megatron's names, with underscores. Missing or None means Megatron's
            default. Flags that do not describe an architecture are ignored.
        name: The architecture's name, for tables and errors.

    Raises:
        ConfigurationError: If a flag without default is missing.
    """
    offered = [flag.replace("-", "_") for flag in _NAMES]
    given = {flag: flags[flag] for flag in offered if flags.get(flag) is not None}
    for needed in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        if needed not in given:
            flag = "--" + needed.replace("_", "-")
            raise ConfigurationError(flag, None, "is missing", "Pass it, or a recipe with --model")
    hidden, gated = given["hidden_size"], given.get("swiglu", False)
    # so that three gated matrices are about as large as two ungated ones; a multiple of 64
    inner = hidden * 8 // (3 * 64) * 64 if gated else 4 * hidden
    fields: dict[str, Any] = {"gated_linear_unit": gated, "ffn_hidden_size": inner}
    kind = TransformerConfig
    if given.get("multi_latent_attention"):
        # the configuration's defaults differ from those of the flags
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
