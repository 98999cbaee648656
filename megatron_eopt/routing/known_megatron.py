"""Layouts of the fused weights of megatron-core's own modules.

Each function below describes one family of modules. The order of rows is the order in which the
module's ``forward`` slices its activations (megatron-core 0.19).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from megatron_eopt.config.arguments import qkv_split_shapes
from megatron_eopt.matrices import (
    Field,
    Section,
    Split,
    SplitT,
    gated,
    per_head,
    periodic,
    qkv,
    side_by_side,
)
from megatron_eopt.routing.plain_names import is_a

type _Lengths = Mapping[str, int]


@dataclass(frozen=True)
class FusedWeight:
    """How the rows of one fused weight are laid out."""

    kind: SplitT  # kind of split, which an option turns on
    rows: int | None  # rows of the unsharded weight; ``None`` if the module does not fix them
    build: Callable[..., Split]  # returns the split for an unsharded shape
    per_head: Mapping[str, Any]  # arguments of ``build`` that make one matrix per attention head


def fused_weight(owner: Any, child: str, linear: nn.Module) -> FusedWeight | None:
    """Return how the weight of ``owner.child`` is fused; ``None`` if it is one matrix or unknown.

    Only the owner's type decides: linear classes differ by back end, and adapters may wrap them.
    """
    if _is(owner, "SelfAttention") and child == "linear_qkv":
        return _grouped_query(owner.config)
    if _is(owner, "CrossAttention") and child == "linear_kv":
        lengths = dict.fromkeys(("k", "v"), owner.config.kv_channels)
        return repeated("qkv", lengths, owner.config.num_attention_heads, lengths)
    if _is(owner, "CrossAttention") and child == "linear_q":
        head_dim = owner.config.kv_channels
        rows = head_dim * owner.config.num_attention_heads
        return FusedWeight("per_head", rows, partial(per_head, head_dim=head_dim), {})
    if _is(owner, "MLP", "TEGroupedMLP") and child == "linear_fc1":
        return _gated_linear_unit(owner)
    if _is(owner, "MultiLatentAttention", "AbsorbedMLASelfAttention"):
        return _latent_attention(owner.config, child)
    if child == "in_proj" and (linear_attention := _linear_attention(owner, linear)) is not None:
        return linear_attention
    return None


def _grouped_query(config: Any) -> FusedWeight:
    """Attention: each query group has its queries, (its gates,) one key and one value."""
    rows = qkv_split_shapes(config)
    return FusedWeight(
        "qkv",
        config.num_query_groups * sum(rows),
        partial(qkv, lengths=rows),
        {"head_dim": config.kv_channels},
    )


def _latent_attention(config: Any, child: str) -> FusedWeight | None:
    """MLA: up projections repeat per head; down projections have a latent and a rotary part."""
    nope, rotary, value = config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
    heads = config.num_attention_heads
    latent = {"kv": config.kv_lora_rank, "k_pos": rotary}
    match child:
        case "linear_q_proj" | "linear_q_up_proj":
            lengths = {"q_nope": nope, "q_pos": rotary}
            return repeated("mla", lengths, heads, lengths)
        case "linear_kv_up_proj":
            lengths = {"k_nope": nope, "v": value}
            return repeated("mla", lengths, heads, lengths)
        case "linear_kv_down_proj":
            return repeated("mla", latent, 1)
        case "linear_qkv_down_proj":
            # two sections, because tensor parallelism shards queries and keys separately
            keys = tuple(Field(name, rows) for name, rows in latent.items())
            sections = (Section((Field("q", config.q_lora_rank),)), Section(keys))
            rows = sum(section.rows for section in sections)
            return FusedWeight("mla", rows, partial(Split, "mla", sections=sections), {})
    return None


def _gated_linear_unit(owner: Any) -> FusedWeight | None:
    """Gated MLP: gate rows, then up rows, on every rank; grouped experts may interleave them."""
    if not owner.config.gated_linear_unit:
        return None
    grouped = _is(owner, "TEGroupedMLP")
    interleave = owner.config.moe_mlp_glu_interleave_size if grouped else None
    return FusedWeight("gated", None, partial(gated, interleave=interleave), {})


def _linear_attention(owner: Any, linear: Any) -> FusedWeight | None:
    """Mamba and gated delta net: stacked projections, each sharded separately."""
    if _is(owner, "MambaMixer"):
        names, sizes = ("z", "x", "B", "C", "dt"), linear.weight.partition_sizes
        head, state = owner.headdim, owner.d_state
        heads = {"z": head, "x": head, "B": state, "C": state}
    elif hasattr(owner, "in_proj_split_sections") and hasattr(owner, "in_proj_split_names"):
        # gated-delta-net modules list their own names and sizes
        names, sizes = owner.in_proj_split_names, owner.in_proj_split_sections
        key, value = owner.key_head_dim, owner.value_head_dim
        heads = {"query": key, "key": key, "value": value, "z": value}
    else:
        return None
    # the module lists the sizes of this rank's shard
    ranks = owner.pg_collection.tp.size()
    lengths = {name: ranks * size for name, size in zip(names, sizes, strict=True)}
    units = {name: unit for name, unit in heads.items() if name in lengths}
    build = partial(side_by_side, "linear_attention", lengths=lengths)
    return FusedWeight("linear_attention", sum(lengths.values()), build, {"units": units})


def _is(module: nn.Module, *names: str) -> bool:
    return is_a(module, "megatron", *names)


def repeated(
    kind: SplitT, lengths: _Lengths, blocks: int, units: _Lengths | None = None
) -> FusedWeight:
    """Return a layout that repeats fields of these rows; ``units`` are the rows of one head."""
    build = partial(periodic, kind, lengths=lengths)
    return FusedWeight(kind, blocks * sum(lengths.values()), build, {"units": units})
