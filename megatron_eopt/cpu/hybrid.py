"""Builds Megatron's HybridModel from local modules instead of Transformer Engine's.

Attention, multi-latent attention, MLPs and experts are built like GPTModel's local layers.
Checkpoints store their separate layer norms under the names of the fused ones. Mamba, gated delta
nets and sparse attention need GPU kernels and raise an error.
"""

from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.models.hybrid import hybrid_block, hybrid_layer_specs
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.cpu.patches import Patch

GPU_LAYERS = {
    Symbols.MAMBA: ("Mamba", "mamba-ssm"),
    Symbols.GDN: ("gated delta net", "flash-linear-attention"),
    Symbols.DS_ATTENTION: ("sparse attention", "fast-hadamard-transform"),
}
"""Names of GPU-only layers, and the package with their kernels."""


def check_pattern(pattern: str) -> None:
    """Raise a ConfigurationError for the first layer of a pattern that needs a GPU."""
    for symbol in pattern:
        if symbol in GPU_LAYERS:
            raise _refusal(symbol, pattern)


def _refusal(symbol: str, pattern: str) -> ConfigurationError:
    layer, package = GPU_LAYERS[symbol]
    rule = f"{layer} layers ({symbol}) use kernels of {package}, which need a GPU"
    hint = "Use attention (*), MLP (-) and MoE (E) layers, or run on a GPU with this package"
    return ConfigurationError("--hybrid-layer-pattern", pattern, rule, hint)


class _OnGpusOnly(torch.nn.Module):
    """Takes the place of a layer that needs a GPU, and raises an error when it is built."""

    def __init__(self, *_args: Any, symbol: str, **_kwargs: Any) -> None:
        # megatron-core constructs the same class again with a longer message as its one argument
        raise ValueError(str(_refusal(symbol, symbol)))


_LOCAL = LocalSpecProvider()
_COLUMN, _ROW = _LOCAL.column_parallel_linear(), _LOCAL.row_parallel_linear()
_NORM = WrappedTorchNorm  # LayerNorm or RMSNorm, as the model's configuration says


def _attention(module: type, submodules: Any, **names: Any) -> TransformerLayerSubmodules:
    attention = ModuleSpec(module, {"attn_mask_type": AttnMaskType.causal}, submodules)
    return TransformerLayerSubmodules(
        _NORM, self_attention=attention, self_attn_bda=get_bias_dropout_add, **names
    )


_ATTENTION = _attention(
    SelfAttention,
    SelfAttentionSubmodules(
        linear_qkv=_COLUMN, core_attention=_LOCAL.core_attention(), linear_proj=_ROW
    ),
    sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
)
_LATENT_ATTENTION = _attention(
    MLASelfAttention,
    MLASelfAttentionSubmodules(
        linear_q_proj=_COLUMN,
        linear_q_down_proj=_COLUMN,
        linear_q_up_proj=_COLUMN,
        linear_kv_down_proj=_COLUMN,
        linear_kv_up_proj=_COLUMN,
        core_attention=_LOCAL.core_attention(),
        linear_proj=_ROW,
        q_layernorm=IdentityOp,
        kv_layernorm=IdentityOp,
    ),
)
_MLP = TransformerLayerSubmodules(
    pre_mlp_layernorm=_NORM,
    mlp=partial(
        MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=_COLUMN, linear_fc2=_ROW)
    ),
    mlp_bda=get_bias_dropout_add,
    sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
)
_EXPERTS = TransformerLayerSubmodules(
    pre_mlp_layernorm=_NORM,
    # the real number comes from the model's configuration
    mlp=get_moe_module_spec_for_backend(_LOCAL, num_experts=8),
    mlp_bda=get_bias_dropout_add,
)
_MULTI_TOKEN_PREDICTION = ModuleSpec(
    module=MultiTokenPredictionLayer,
    submodules=MultiTokenPredictionLayerSubmodules(
        enorm=_NORM, hnorm=_NORM, eh_proj=_COLUMN, mtp_model_layer=None, layer_norm=_NORM
    ),
)


def _on_gpus_only(symbol: str) -> ModuleSpec:
    return ModuleSpec(module=_OnGpusOnly, params={"symbol": symbol})


LOCAL_LAYERS = HybridStackSubmodules(
    mamba_layer=_on_gpus_only(Symbols.MAMBA),
    gdn_layer=_on_gpus_only(Symbols.GDN),
    dsa_layer=_on_gpus_only(Symbols.DS_ATTENTION),
    attention_layer=ModuleSpec(module=TransformerLayer, submodules=_ATTENTION),
    mla_layer=ModuleSpec(module=TransformerLayer, submodules=_LATENT_ATTENTION),
    mlp_layer=ModuleSpec(module=MLPLayer, submodules=_MLP),
    moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=_EXPERTS),
    mtp_block_spec=ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[_MULTI_TOKEN_PREDICTION]),
    ),
)
"""megatron-core's table of hybrid layers, with local modules."""


def hybrid_patches() -> list[Patch]:
    """Return the patches that put local layers into megatron-core's hybrid stack."""
    return [
        Patch(hybrid_layer_specs.hybrid_stack_spec, "submodules", LOCAL_LAYERS),
        Patch(hybrid_block, "TENorm", WrappedTorchNorm),
    ]
