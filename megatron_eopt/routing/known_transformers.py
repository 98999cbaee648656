"""Weights of transformers, diffusers and timm, and of modules that name their layers alike.

Classes are known by name, so nothing here imports these packages. The order of a fused weight's
rows is the order in which ``forward`` slices its activations (transformers 5).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from megatron_eopt.base.place import whole_shape
from megatron_eopt.matrices import Split, gated, per_head, periodic, qkv
from megatron_eopt.routing.known_megatron import FusedWeight, repeated
from megatron_eopt.routing.plain_names import is_a

GATED = {"gate_up_proj": "down_proj", "input_linear": "output_linear"}
"""What transformers calls a linear module, or a parameter of all experts, that has gate and up, and
what follows it."""

_INPUTS_FIRST = {
    "transformers": ("Conv1D", "Gemma3MultiModalProjector", "T5Gemma2MultiModalProjector"),
    "timm": ("CondConv2d",),
}
"""Classes whose weights are ``(in, out)``, by their package."""

_EXPERTS_INPUTS_FIRST = {
    "transformers": (
        "AriaExperts",
        "GptOssExperts",
        "Llama4TextExperts",
        "OpenAIPrivacyFilterExperts",
    ),
    "diffusers": ("SwiGLUExperts",),
}
"""Classes whose weights are ``(experts, in, out)``."""

_EXPERTS_OUTPUTS_FIRST = {
    "transformers": (
        "InklingSharedExperts",
        "JetMoeParallelExperts",
        "LongcatFlashExperts",
        "Step3p7Experts",
    ),
}
"""Classes whose weights are ``(experts, out, in)``, besides those that say ``is_transposed``."""

_HALVES = {
    "transformers": (
        "DiaMLP",
        "Dots3NoteAudioMLP",
        "EsmFold2SwiGLU",
        "Glm4MLP",
        "Glm4vTextMLP",
        "GlmImageTextMLP",
        "GlmMLP",
        "GlmOcrTextMLP",
        "GraniteMoeHybridMLP",
        "GraniteMoeSWAMLP",
        "GraniteMoeSharedMLP",
        "JetMoeMoE",
        "Llama4TextExperts",
        "LongcatFlashExperts",
        "MiniMaxM3VLDenseMLP",
        "Phi3MLP",
        "Phi4MultimodalAudioMLP",
        "Phi4MultimodalMLP",
        "Step3p7Experts",
        "Zamba2MLP",
    ),
    "diffusers": ("OmniGenFeedForward", "SwiGLUExperts"),
}
"""Classes that cut gate from up in the middle, besides those that say ``is_concatenated``."""

_THIRDS = {
    "timm.layers.attention": ("Attention", "AttentionRope"),
    "timm.layers.diff_attention": ("DiffAttention",),
    "timm.models.beit": ("Attention",),
    "timm.models.cait": ("TalkingHeadAttn",),
    "timm.models.coat": ("FactorAttnConvRelPosEnc",),
    "timm.models.convit": ("MHSA",),
    "timm.models.davit": ("ChannelAttention", "ChannelAttentionV2", "WindowAttention"),
    "timm.models.edgenext": ("CrossCovarianceAttn",),
    "timm.models.eva": ("EvaAttention",),
    "timm.models.fastvit": ("Attention",),
    "timm.models.hiera": ("MaskUnitAttention",),
    "timm.models.hieradet_sam2": ("MultiScaleAttention",),
    "timm.models.metaformer": ("Attention",),
    "timm.models.mvitv2": ("MultiScaleAttention",),
    "timm.models.nest": ("Attention",),
    "timm.models.swin_transformer": ("WindowAttention",),
    "timm.models.swin_transformer_v2": ("WindowAttention",),
    "timm.models.swin_transformer_v2_cr": ("WindowMultiHeadAttention",),
    "timm.models.twins": ("LocallyGroupedAttn",),
    "timm.models.vision_transformer_relpos": ("RelPosAttention",),
    "timm.models.vision_transformer_sam": ("Attention",),
    "timm.models.volo": ("Attention",),
    "timm.models.xcit": ("XCA",),
}
"""Classes whose ``qkv`` has all queries, then all keys, then all values, by their module: timm has
others of the same name."""

_GATED_QUERIES = (
    "Qwen3NextAttention",
    "Qwen3_5Attention",
    "Qwen3_5MoeAttention",
    "Qwen4ExpTextAttention",
)
"""Classes of transformers whose ``q_proj`` has the queries of a head, then their gates."""

_SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("query_proj", "key_proj", "value_proj"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
)
"""What modules call separate projections to queries, keys and values."""

_HEAD_DIM = ("head_dim", "attention_head_size", "key_value_proj_dim")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
"""Attributes of attention modules, or of their configurations, in transformers and elsewhere."""


def fused_weight(owner: nn.Module, child: str, linear: nn.Module) -> FusedWeight | None:
    """Return how the weight of ``owner.child`` is fused; None if it is one matrix or unknown."""
    if (latent := _latent_attention(owner, child)) is not None:
        return latent
    if (groups := getattr(linear, "n_groups", 0)) and isinstance(linear, nn.Linear):
        return FusedWeight("mla", None, partial(_in_groups, groups=groups), {})
    if child in GATED:
        return _gate_beside_up(owner, child)
    if child == "qkv" and isinstance(linear, nn.Linear) and _has_thirds(owner):
        return _thirds(_number(_HEADS, owner))
    if child == "q_proj" and is_a(owner, "transformers", *_GATED_QUERIES):
        return _gated_queries(owner)
    names = _names_beside(owner, child)
    return None if names is None else _heads(owner, child, names)


def own_weight(module: nn.Module, leaf: str) -> FusedWeight | None:
    """Return how a module's own parameter is fused; None if it is one matrix or unknown."""
    if isinstance(module, nn.MultiheadAttention) and leaf == "in_proj_weight":
        return _thirds(module.num_heads)
    return None


def inputs_first(module: nn.Module, dims: int) -> bool | None:
    """Whether a module's weight is ``(in, out)``, or ``(experts, in, out)``; None if unknown.

    A 2-D weight of an unknown class counts as ``(out, in)``, as in ``torch.nn.Linear``.

    Args:
        module: The module.
        dims: How many dimensions its weight has.
    """
    if dims == 2:
        return _is_any(module, _INPUTS_FIRST)
    # transformers sets it on modules of experts
    declared = getattr(module, "is_transposed", None)
    if isinstance(declared, bool):
        return declared
    if _is_any(module, _EXPERTS_INPUTS_FIRST):
        return True
    return False if _is_any(module, _EXPERTS_OUTPUTS_FIRST) else None


def _is_any(module: nn.Module, classes: Mapping[str, Sequence[str]]) -> bool:
    return any(is_a(module, package, *names) for package, names in classes.items())


def looks_like_heads(owner: nn.Module, child: str) -> bool:
    """Whether ``owner.child`` is a projection to queries, keys or values, by the names there."""
    return _names_beside(owner, child) is not None


def _names_beside(owner: nn.Module, child: str) -> tuple[str, str, str] | None:
    """Return what ``owner`` calls its projections to queries, keys and values."""
    named = (names for names in _SEPARATE if child in names)
    both = (names for names in named if all(hasattr(owner, name) for name in names[:2]))
    return next(both, None)


def _heads(owner: nn.Module, child: str, names: Sequence[str]) -> FusedWeight | None:
    """Return the heads of a separate projection, as its module gives their size or number."""
    queries, rows = (_shape_of(owner, name)[0] for name in (names[0], child))
    config = getattr(owner, "config", None)
    heads = _number(_HEADS, owner, config)
    # keys and values have fewer heads than queries if they have fewer rows
    if child != names[0] and rows != queries:
        heads = _number(_KEY_HEADS, owner, config)
    head_dim = _number(_HEAD_DIM, owner) or (rows // heads if heads else 0)
    if not head_dim or rows % head_dim:
        return None
    return FusedWeight("per_head", None, partial(per_head, head_dim=head_dim), {})


def _shape_of(owner: nn.Module, name: str) -> tuple[int, ...]:
    """Return the outputs and inputs, last, of a parameter or of the weight of a linear layer.

    An adapter may wrap the layer. A parametrized weight is not computed, which could change state.
    """
    # a scripted module's tables of parameters and modules are no dictionaries
    item: Any = dict(owner.named_children()).get(name)
    item = getattr(item, "base_layer", item)
    if item is not None:
        owner, name = item, "weight"
    own = dict(owner.named_parameters(recurse=False)).get(name)
    if own is None and parametrize.is_parametrized(owner, name):
        own = owner.get_submodule(f"parametrizations.{name}")._parameters.get("original")
    if own is None:
        return (getattr(item, "out_features", 0), getattr(item, "in_features", 0))
    *experts, rows, cols = whole_shape(own)
    if inputs_first(owner, own.dim()):
        rows, cols = cols, rows
    return (*experts, rows, cols)


def _number(names: tuple[str, ...], *holders: Any) -> int | None:
    """Return the first of these attributes that is a positive integer."""
    values = (getattr(holder, name, None) for holder in holders for name in names)
    return next((n for n in values if isinstance(n, int) and n > 0), None)


def _latent_attention(owner: nn.Module, child: str) -> FusedWeight | None:
    """MLA: the parts of megatron-core's, under DeepSeek's names."""
    if child not in ("q_b_proj", "q_proj", "kv_b_proj", "kv_a_proj_with_mqa"):
        return None
    config = getattr(owner, "config", None)
    sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    nope, rotary, value, latent = (_number((name,), owner, config) for name in sizes)
    heads = _number(_HEADS, owner, config)
    if heads and child == "q_b_proj" and hasattr(owner, "o_a_proj"):
        # DeepSeek-V4's queries, whose heads rotate in their last rows only
        rows = _shape_of(owner, child)[0]
        return FusedWeight("per_head", rows, partial(per_head, head_dim=rows // heads), {})
    if not (hasattr(owner, "kv_b_proj") and nope and rotary and value and latent and heads):
        return None
    if child == "kv_a_proj_with_mqa":
        return repeated("mla", {"kv": latent, "k_pos": rotary}, 1)
    of_values = child == "kv_b_proj"
    lengths = {"k_nope": nope, "v": value} if of_values else {"q_nope": nope, "q_pos": rotary}
    return repeated("mla", lengths, heads, lengths)


def _has_thirds(owner: nn.Module) -> bool:
    return any(cls.__name__ in _THIRDS.get(cls.__module__, ()) for cls in type(owner).__mro__)


def _thirds(heads: int | None) -> FusedWeight:
    """Queries, keys and values of equal size, one below another."""
    return FusedWeight("qkv", None, _in_thirds, {"heads": heads})


def _in_thirds(shape: tuple[int, ...], *, heads: int | None = None) -> Split:
    rows = shape[-2] // 3
    return qkv(shape, [rows] * 3, head_dim=rows // heads if heads else None)


def _gated_queries(owner: nn.Module) -> FusedWeight | None:
    """Queries and gates, which alternate by head."""
    head_dim = _number(_HEAD_DIM, owner)
    if not head_dim:
        return None
    lengths = {"q": head_dim, "gate": head_dim}
    return repeated("qkv", lengths, _shape_of(owner, "q_proj")[0] // (2 * head_dim), lengths)


def _in_groups(shape: tuple[int, ...], *, groups: int) -> Split:
    """Projection whose groups of outputs read inputs of their own: one matrix for each group."""
    rows = shape[-2]
    return periodic("mla", shape, {"group": rows}, units={"group": rows // groups})


def _gate_beside_up(owner: nn.Module, child: str) -> FusedWeight | None:
    """Gated MLP: the outputs of the gate, then those of up. Others are not split."""
    outputs, inputs = _shape_of(owner, child)[-2], _shape_of(owner, GATED[child])[-1]
    declared = getattr(owner, "is_concatenated", None)  # set by transformers, too
    has_halves = declared if isinstance(declared, bool) else _is_any(owner, _HALVES)
    fits = 0 < outputs == 2 * inputs and has_halves
    return FusedWeight("gated", None, gated, {}) if fits else None
