"""Where an architecture is read from: a config.json of Hugging Face, or Megatron's flags."""

import argparse
import ast
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from megatron_eopt.base.errors import ConfigurationError, check_choice
from megatron_eopt.plan.architectures import SEQ_LENGTH, Architecture, Experts, LatentAttention

__all__ = ["add_flags", "from_flags", "from_hugging_face"]


class _Fields:
    """Reads values of the right kind, and refuses others by the name that the user knows."""

    def __init__(self, values: Mapping[str, Any], shown: Callable[[str], str] = str) -> None:
        self._values, self._shown = values, shown

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name)

    def number(self, name: str, default: int | None = None, *, at_least: int = 1) -> int:
        value = default if self[name] is None else self[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            self.refuse(name, f"must be a whole number of at least {at_least}", "Give one")
        return value

    def optional(self, name: str) -> int | None:
        return None if self[name] is None else self.number(name)

    def switch(self, name: str) -> bool:
        if not isinstance(self[name], bool | None):
            self.refuse(name, "is on or off", "Give true or false")
        return bool(self[name])

    def refuse(self, name: str, rule: str, way_out: str) -> NoReturn:
        raise ConfigurationError(self._shown(name), self[name], rule, way_out)


def _head_size(read: _Fields, given: int | None) -> int:
    hidden, heads = read.number("hidden_size"), read.number("num_attention_heads")
    if given is None and hidden % heads:
        rule = f"must divide the hidden size {hidden} if no size of a head is given"
        read.refuse("num_attention_heads", rule, "Give the size of a head")
    return given or hidden // heads


def from_hugging_face(path: str | Path, *, seq_length: int = SEQ_LENGTH) -> Architecture:
    """Read a config.json of a published model; its folder is its name.

    Layers that predict further tokens are left out, as is what decides no weight.

    Args:
        path: The file, or the folder that has it.
        seq_length: Tokens of a sequence in training, which the file does not say.

    Raises:
        ConfigurationError: If the file cannot be read, is of a kind of model that is not served, or
            a field is missing, of another type, or asks for what is not served.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        way_out = "Give the config.json of a model, or its folder"
        raise ConfigurationError("path", str(path), f"cannot be read ({error})", way_out) from error
    if not isinstance(values, dict):
        rule = "must hold fields by name"
        raise ConfigurationError("path", str(path), rule, "Give the config.json of a model")
    kind = str(values.get("model_type", ""))
    check_choice("model_type", kind, _SERVED)
    read = _Fields(values)
    _refuse_variants(read)
    hidden, heads = read.number("hidden_size"), read.number("num_attention_heads")
    latent = kind in ("deepseek_v3", "kimi_k2")
    # the first Llama has as many as heads, and does not say so
    groups = read.number("num_key_value_heads", heads if kind == "llama" else None)
    head = read.number("head_dim") if kind in ("qwen3", "qwen3_moe") else read.optional("head_dim")
    experts = _EXPERTS.get(kind)
    return Architecture(
        name=file.absolute().parent.name,
        num_layers=read.number("num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=read.number("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=read.number("v_head_dim") if latent else _head_size(read, head),
        vocab_size=read.number("vocab_size"),
        untied=not read.switch("tie_word_embeddings"),
        add_qkv_bias=kind == "qwen2",
        qk_layernorm=kind in ("qwen3", "qwen3_moe", "deepseek_v3", "kimi_k2"),
        latent=_latent_of_deepseek(read) if latent else None,
        experts=experts(read) if experts else None,
        seq_length=seq_length,
    )


def _refuse_variants(read: _Fields) -> None:
    """Refuse weights, or activations, that an architecture does not describe."""
    for name in ("attention_bias", "mlp_bias"):
        if read.switch(name):
            read.refuse(name, "only the biases of qwen2 are served", "Choose a model without")
    if read["hidden_act"] not in (None, "silu"):
        read.refuse("hidden_act", "must be silu, of gated MLPs", "Choose another model")


def _latent_of_deepseek(read: _Fields) -> LatentAttention:
    return LatentAttention(
        q_lora_rank=read.optional("q_lora_rank"),
        kv_lora_rank=read.number("kv_lora_rank"),
        qk_head_dim=read.number("qk_nope_head_dim"),
        qk_pos_emb_head_dim=read.number("qk_rope_head_dim"),
        v_head_dim=read.number("v_head_dim"),
    )


def _experts_of_deepseek(read: _Fields) -> Experts:
    layers, inner = range(read.number("num_hidden_layers")), read.number("moe_intermediate_size")
    dense, every = (
        read.number("first_k_dense_replace", at_least=0),
        read.number("moe_layer_freq", 1),
    )
    shared = read.number("n_shared_experts", 0, at_least=0)
    return Experts(
        num_moe_experts=read.number("n_routed_experts"),
        moe_ffn_hidden_size=inner,
        moe_router_topk=read.number("num_experts_per_tok"),
        moe_shared_expert_intermediate_size=shared * inner or None,
        moe_layer_freq=tuple(int(layer >= dense and layer % every == 0) for layer in layers),
    )


def _experts_of_mixtral(read: _Fields) -> Experts:
    experts, inner = read.number("num_local_experts"), read.number("intermediate_size")
    return Experts(experts, inner, read.number("num_experts_per_tok"))


def _experts_of_qwen3(read: _Fields) -> Experts:
    every, dense = read.number("decoder_sparse_step", 1), read["mlp_only_layers"] or []
    if not isinstance(dense, list):
        read.refuse("mlp_only_layers", "must be a list of layers", "Give one")
    layers = range(read.number("num_hidden_layers"))
    return Experts(
        num_moe_experts=read.number("num_experts"),
        moe_ffn_hidden_size=read.number("moe_intermediate_size"),
        moe_router_topk=read.number("num_experts_per_tok"),
        moe_layer_freq=tuple(int(n not in dense and (n + 1) % every == 0) for n in layers),
    )


_EXPERTS: dict[str, Callable[[_Fields], Experts]] = {
    "mixtral": _experts_of_mixtral,
    "qwen3_moe": _experts_of_qwen3,
    "deepseek_v3": _experts_of_deepseek,
    "kimi_k2": _experts_of_deepseek,
}
_SERVED = ("llama", "mistral", "qwen2", "qwen3", *_EXPERTS)

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
_NEEDS = {
    "moe_ffn_hidden_size": "num_experts",
    "moe_shared_expert_intermediate_size": "num_experts",
    "q_lora_rank": "multi_latent_attention",
}
"""Flags that mean nothing without another, where Megatron has no value of its own."""


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
    group.add_argument("--moe-layer-freq", metavar="N", help=text)


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
        ConfigurationError: If a flag is missing, of another type, or has no meaning beside others.
    """
    read = _Fields(flags, lambda field: "--" + field.replace("_", "-"))
    for field, needed in _NEEDS.items():
        if read[field] is not None and not read[needed]:
            flag = "--" + needed.replace("_", "-")
            read.refuse(field, f"has no meaning without {flag}", f"Pass {flag}, or leave it out")
    hidden, heads = read.number("hidden_size"), read.number("num_attention_heads")
    gated, grouped = read.switch("swiglu"), read.switch("group_query_attention")
    # Megatron's namespace has the default 1 without groups, too
    if not grouped and read.number("num_query_groups", 1) > 1:
        way_out = "Pass --group-query-attention, or leave it out"
        read.refuse("num_query_groups", "has no meaning without --group-query-attention", way_out)
    # gated MLPs have three matrices, about as large as the two of others; a multiple of 64
    usual = hidden * 8 // (3 * 64) * 64 if gated else 4 * hidden
    inner = read.number("ffn_hidden_size", usual)
    return Architecture(
        name=name,
        num_layers=read.number("num_layers"),
        hidden_size=hidden,
        ffn_hidden_size=inner,
        num_attention_heads=heads,
        num_query_groups=read.number("num_query_groups", 1) if grouped else heads,
        kv_channels=_head_size(read, read.optional("kv_channels")),
        vocab_size=read.number("vocab_size"),
        gated=gated,
        untied=read.switch("untie_embeddings_and_output_weights"),
        add_qkv_bias=read.switch("add_qkv_bias"),
        qk_layernorm=read.switch("qk_layernorm"),
        latent=_latent_of_flags(read) if read.switch("multi_latent_attention") else None,
        experts=_experts_of_flags(read, inner) if read["num_experts"] is not None else None,
        seq_length=read.number("seq_length", SEQ_LENGTH),
    )


def _latent_of_flags(read: _Fields) -> LatentAttention:
    return LatentAttention(
        q_lora_rank=read.optional("q_lora_rank"),
        kv_lora_rank=read.number("kv_lora_rank", 32),
        qk_head_dim=read.number("qk_head_dim", 128),
        qk_pos_emb_head_dim=read.number("qk_pos_emb_head_dim", 64),
        v_head_dim=read.number("v_head_dim", 128),
    )


def _experts_of_flags(read: _Fields, inner: int) -> Experts:
    return Experts(
        num_moe_experts=read.number("num_experts"),
        moe_ffn_hidden_size=read.number("moe_ffn_hidden_size", inner),
        moe_router_topk=read.number("moe_router_topk", 2),
        moe_shared_expert_intermediate_size=read.optional("moe_shared_expert_intermediate_size"),
        moe_layer_freq=_frequency(read),
    )


def _frequency(read: _Fields) -> int | tuple[int, ...]:
    """Return what --moe-layer-freq says: a number, a list, or text of either."""
    value = 1 if read["moe_layer_freq"] is None else read["moe_layer_freq"]
    try:
        found = _pattern(ast.parse(value, mode="eval").body) if isinstance(value, str) else value
        if isinstance(found, int):
            return found
        return tuple(map(int, found))
    except (SyntaxError, TypeError, ValueError, MemoryError, OverflowError):
        read.refuse("moe_layer_freq", "must be a number or a list", 'Write it like "[0]*3+[1]*58"')


def _pattern(node: ast.expr) -> Any:
    """Compute an expression of numbers and lists with ``+`` and ``*``."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=items):
            return [_pattern(item) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _pattern(left) + _pattern(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _pattern(left) * _pattern(right)
    raise ValueError(ast.unparse(node))
