"""The weights behind each head's queries and keys, and the recording of its largest logit."""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.attention import Attention, CrossAttention, SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.utils import (
    get_default_causal_mask,
    get_sliding_window_causal_mask,
)
from torch import Tensor, distributed, nn
from torch.nn.functional import pad

from megatron_eopt.base.errors import ConfigurationError, check_number
from megatron_eopt.base.place import remat_size, whole_shape
from megatron_eopt.config.arguments import qkv_split_shapes

_WAY_OUT = "use megatron-core's SelfAttention or MLASelfAttention with its DotProductAttention"


@dataclass(frozen=True, eq=False)
class Projection:
    """A weight whose rows produce queries or keys."""

    weight: Tensor  # the local tensor-parallel shard, cut along the rows
    blocks: int  # heads or query groups of the unsharded weight
    # consecutive rows of a block, and the power of the head's factor that scales them
    parts: tuple[tuple[int, float], ...]

    def factors(self, of_heads: Tensor, rank: int) -> Tensor:
        """Return the factor for each row of the local weight.

        Args:
            of_heads: Factor of each head's logits, ``(heads,)``; a query group takes the smallest.
            rank: This rank's position in the tensor-parallel group.
        """
        factor = of_heads.view(self.blocks, -1).amin(1, keepdim=True)
        rows = [factor.pow(power).expand(-1, count) for count, power in self.parts]
        # tensor parallelism cuts first, then weight rematerialization cuts the rows of the slab
        slab, local = whole_shape(self.weight)[0], self.weight.shape[0]
        factors = torch.cat(rows, dim=1).reshape(-1)[rank * slab : (rank + 1) * slab]
        if remat_size(self.weight) > 1:
            first = distributed.get_rank(self.weight.group) * local  # type: ignore[attr-defined]
            factors = factors[first : first + local]
        # padding rows are zero, whatever their factor
        return pad(factors, (0, local - len(factors)), value=1.0)


def attentions(chunk: nn.Module) -> Iterator[Any]:
    """Yield the self-attention modules of a model chunk, in order."""
    for module in chunk.modules():
        if isinstance(module, SelfAttention | MLASelfAttention):
            yield module


def projections(attention: Any) -> list[Projection]:
    """Return the weights that produce a module's queries and keys.

    Raises:
        ConfigurationError: If the module does not have the expected weights.
    """
    config = attention.config
    alpha = config.qk_clip_alpha
    heads = config.num_attention_heads
    if isinstance(attention, SelfAttention):
        queries, *gate, keys, values = qkv_split_shapes(config)
        gates = [(rows, 0.0) for rows in gate]
        parts = ((queries, alpha), *gates, (keys, 1 - alpha), (values, 0.0))
        return [Projection(_weight(attention, "linear_qkv"), config.num_query_groups, parts)]
    nope = config.qk_head_dim
    low_rank = config.q_lora_rank is not None
    # all heads share the rotary key, so only the queries can reduce its part of the logits
    query = ((nope, alpha), (config.qk_pos_emb_head_dim, 1.0))
    key = ((nope, 1 - alpha), (config.v_head_dim, 0.0))
    return [
        Projection(
            _weight(attention, "linear_q_up_proj" if low_rank else "linear_q_proj"), heads, query
        ),
        Projection(_weight(attention, "linear_kv_up_proj"), heads, key),
    ]


def _weight(attention: Any, name: str) -> Tensor:
    weight = getattr(getattr(attention, name, None), "weight", None)
    if not isinstance(weight, Tensor):
        rule = f"scales the weight of {name}, but {type(attention).__name__} has none"
        raise ConfigurationError("qk_clip", True, rule, f"Set qk_clip=False, or {_WAY_OUT}")
    return weight


def prepare(model_chunks: Iterable[nn.Module]) -> None:
    """Check the QK-clip settings and let Megatron's local attention record its largest logits.

    It records if ``qk_clip`` or ``log_max_attention_logit`` is set. Transformer Engine's does so
    anyway.

    Raises:
        ConfigurationError: If a number is out of bounds, or a module cannot clip or record logits.
        ConfigurationTypeError: If a setting is not a number.
    """
    for chunk in model_chunks:
        for attention in chunk.modules() if isinstance(chunk, nn.Module) else ():
            if not isinstance(attention, Attention) or isinstance(attention, CrossAttention):
                continue
            config: Any = attention.config
            if config.qk_clip or config.log_max_attention_logit:
                _let_record(attention)
            if config.qk_clip:
                _check(attention)


def _let_record(attention: Attention) -> None:
    core: Any = getattr(attention, "core_attention", None)
    if isinstance(core, DotProductAttention) and not hasattr(core, "current_max_attn_logits"):
        core.current_max_attn_logits = None
        # the scores enter the softmax without scale and mask, which ``_note`` therefore applies
        core.scale_mask_softmax.register_forward_pre_hook(functools.partial(_note, core))
    is_self = isinstance(attention, SelfAttention | MLASelfAttention)
    if is_self and hasattr(core, "current_max_attn_logits"):
        return
    argument = "qk_clip" if attention.config.qk_clip else "log_max_attention_logit"
    pair = f"{type(attention).__name__} with {type(core).__name__}"
    rule = f"needs the largest logit of each head, which {pair} does not record"
    raise ConfigurationError(argument, True, rule, f"Set {argument}=False, or {_WAY_OUT}")


def _check(attention: Attention) -> None:
    config: Any = attention.config
    check_number("qk_clip_alpha", config.qk_clip_alpha, at_least=0, at_most=1)
    check_number("qk_clip_threshold", config.qk_clip_threshold, above=0)
    trained = [item.weight.requires_grad for item in projections(attention)]
    if any(trained) and not all(trained):
        layer = attention.layer_number
        rule = f"scales query and key weights together, but in layer {layer} some are frozen"
        hint = "Freeze all of them (they are then not clipped) or none, or set qk_clip=False"
        raise ConfigurationError("qk_clip", True, rule, hint)
    norms = [getattr(attention, name, None) for name in ("q_layernorm", "k_layernorm")]
    if isinstance(attention, SelfAttention) and any(
        norm is not None and not isinstance(norm, IdentityOp) for norm in norms
    ):
        rule = "scales weights before a norm of queries and keys, which undoes the scaling"
        raise ConfigurationError("qk_clip", True, rule, "Set qk_clip=False, or qk_layernorm=False")


@torch.no_grad()
def _note(core: Any, softmax: Any, inputs: tuple[Any, ...]) -> None:
    """Record the largest logit of each local head from the scores that enter the softmax."""
    # evaluation must not change weights
    if not core.training:
        return
    scores: Tensor = inputs[0].detach().float()
    mask = inputs[1]
    if softmax.scale is not None:
        scores = scores * softmax.scale
    queries, keys = scores.shape[2:]
    if softmax.window_size is not None:
        mask = get_sliding_window_causal_mask(queries, keys, softmax.window_size)
    elif softmax.attn_mask_type == AttnMaskType.causal and mask is None and queries > 1:
        mask = get_default_causal_mask(queries)
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    largest, recorded = scores.amax(dim=(0, 2, 3)), core.current_max_attn_logits
    core.current_max_attn_logits = largest if recorded is None else torch.maximum(recorded, largest)
