"""Real megatron-core modules with every kind of fused weight, built inside a rank."""

from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.attention import CrossAttention, SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.multi_latent_attention import FusedMLASelfAttention, MLASelfAttention
from torch import nn

HIDDEN = 24
GATED = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
PROJECTIONS: Any = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}


def set_up(tp_size: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp_size)
    model_parallel_cuda_manual_seed(1)
    # the same master weights whatever the size of the group
    torch.manual_seed(1)


def config(tp_size: int = 1, kind: Any = TransformerConfig, **changes: Any) -> Any:
    fields = {"num_layers": 1, "hidden_size": HIDDEN, "ffn_hidden_size": 20}
    fields |= {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 6}
    fields |= {"use_cpu_initialization": True, "tensor_model_parallel_size": tp_size}
    fields |= {"add_bias_linear": False, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return kind(**fields | changes)


def mla_config(tp_size: int = 1, **changes: Any) -> MLATransformerConfig:
    fields: dict[str, Any] = {"num_query_groups": None, "kv_channels": None, "rope_type": "rope"}
    fields |= {"q_lora_rank": 8, "kv_lora_rank": 6}
    fields |= {"qk_head_dim": 6, "qk_pos_emb_head_dim": 2, "v_head_dim": 4}
    return config(tp_size, MLATransformerConfig, **fields | changes)


def gpt(settings: TransformerConfig, **spec: Any) -> GPTModel:
    sizes = {"vocab_size": 32, "max_sequence_length": 16}
    layer = get_gpt_layer_local_spec(**spec)
    return GPTModel(settings, layer, **sizes, position_embedding_type="rope")


def attention(settings: TransformerConfig) -> SelfAttention:
    spec = get_gpt_layer_local_spec().submodules.self_attention
    return SelfAttention(config=settings, submodules=spec.submodules, layer_number=1)


def cross_attention(settings: TransformerConfig) -> CrossAttention:
    submodules: Any = get_gpt_layer_local_spec().submodules.self_attention.submodules
    submodules.linear_q = submodules.linear_kv = ColumnParallelLinear
    return CrossAttention(settings, submodules, layer_number=1)


def mla(settings: MLATransformerConfig, *, fused: bool = False) -> MLASelfAttention:
    spec = get_gpt_layer_local_spec(multi_latent_attention=True).submodules.self_attention
    submodules = spec.submodules
    submodules.q_layernorm = submodules.kv_layernorm = IdentityOp
    # the local attention kernel does not take MLA's head sizes; the projections need none
    submodules.core_attention = IdentityOp
    if not fused:
        return MLASelfAttention(config=settings, submodules=submodules, layer_number=1)
    submodules.linear_qkv_down_proj = ColumnParallelLinear
    return FusedMLASelfAttention(config=settings, submodules=submodules, layer_number=1)


def mlp(settings: TransformerConfig) -> MLP:
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return MLP(settings, submodules, ffn_hidden_size=settings.ffn_hidden_size)


class GroupedLinear(nn.Module):
    """Holds weights as Transformer Engine's grouped linear layer does; that needs a GPU.

    One weight ``(out, in)`` per expert, or one ``(experts, out, in)`` for all of them.
    """

    def __init__(self, experts: int, inputs: int, outputs: int, **options: Any) -> None:
        super().__init__()
        single = options["config"].moe_single_grouped_weight
        shape = (experts, outputs, inputs) if single else (outputs, inputs)
        for name in ["weight"] if single else [f"weight{i}" for i in range(experts)]:
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


def grouped_experts(**changes: Any) -> TEGroupedMLP:
    # set afterwards what the config refuses to take where Transformer Engine is absent
    late = {name: changes.pop(name) for name in list(changes) if name.startswith("moe_single")}
    settings = config(**GATED, num_moe_experts=3, moe_ffn_hidden_size=8, **changes)
    for name, value in late.items():
        setattr(settings, name, value)
    submodules = GroupedMLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return TEGroupedMLP(3, settings, submodules, pg_collection=groups)


def gated_delta_net(tp_size: int = 1) -> GatedDeltaNet:
    """Build it without its kernels, which exist for GPUs only; its forward cannot run here."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 2}
    sizes |= {"linear_key_head_dim": 3, "linear_value_head_dim": 5}
    how = {"activation_func": torch.nn.functional.silu, "deterministic_mode": True}
    settings = config(tp_size, **sizes, **how)
    submodules = GatedDeltaNetSubmodules(**PROJECTIONS, out_norm=IdentityOp)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with mock.patch.object(common, "HAVE_FLA", True):
        return GatedDeltaNet(settings, submodules, layer_number=1, pg_collection=groups)


def mamba(tp_size: int = 1) -> mamba_mixer.MambaMixer:
    """Build it without its kernels, which exist for GPUs only; its forward cannot run here."""
    settings = config(tp_size, mamba_state_dim=3, mamba_head_dim=6, mamba_num_groups=2)
    submodules = mamba_mixer.MambaMixerSubmodules(**PROJECTIONS)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    how = {"rmsnorm": False, "layer_number": 1, "pg_collection": groups}
    with mock.patch.object(mamba_mixer, "HAVE_MAMBA_SSM", True):
        return mamba_mixer.MambaMixer(settings, submodules, HIDDEN, **how)
