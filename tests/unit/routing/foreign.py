"""Tiny models of transformers, timm and diffusers with random weights, and their routing.

    python -m tests.unit.routing.foreign

records the routing of all models of the installed libraries in :data:`EXPECTED`.
"""

import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.fsdp2 import build_optimizer
from tests.harness.log import listening

EXPECTED = Path(__file__).with_suffix(".yaml")
"""By library, model and kind of parameter: optimizer, split, weight decay, and why."""

_TEXT = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
_IMAGE = {"image_size": 8, "patch_size": 4, "num_channels": 3, "num_labels": 3}

TRANSFORMERS: dict[str, dict[str, Any]] = {
    # class of the model, and fields of its configuration
    "LlamaForCausalLM": _TEXT,
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32},
    "BertForSequenceClassification": _TEXT | {"num_labels": 3},
    "T5ForConditionalGeneration": {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1}
    | {"num_heads": 2, "vocab_size": 48},
    "MambaForCausalLM": _TEXT | {"state_size": 4, "time_step_rank": 2},
    "Qwen3MoeForCausalLM": _TEXT | _EXPERTS | {"moe_intermediate_size": 8, "head_dim": 8},
    "GptOssForCausalLM": _TEXT | _EXPERTS | {"head_dim": 8},
    "Llama4ForCausalLM": _TEXT | _EXPERTS | {"head_dim": 8, "intermediate_size_mlp": 24},
    "JetMoeForCausalLM": _TEXT | _EXPERTS | {"kv_channels": 8, "num_key_value_heads": 2},
    "DeepseekV3ForCausalLM": _TEXT
    | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 1}
    | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    | {"v_head_dim": 4, "moe_intermediate_size": 8, "first_k_dense_replace": 0},
    "Qwen3NextForCausalLM": _TEXT
    | _EXPERTS
    | {"head_dim": 8, "linear_num_key_heads": 1, "linear_num_value_heads": 2}
    | {"linear_key_head_dim": 4, "linear_value_head_dim": 4, "moe_intermediate_size": 8}
    | {"shared_expert_intermediate_size": 8, "layer_types": ["linear_attention"]},
    "CohereForCausalLM": _TEXT | {"use_qk_norm": True},
    "Phi3ForSequenceClassification": _TEXT | {"num_labels": 2},
    "ViTForImageClassification": _TEXT | _IMAGE,
    "DetrForObjectDetection": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    | {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 3}
    | {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_labels": 5}
    | {
        "use_timm_backbone": False,
        "backbone_config": {"model_type": "resnet", "depths": [1]}
        | {"embedding_size": 8, "hidden_sizes": [8], "out_features": ["stage1"]},
    },
    "PerceiverForSequenceClassification": {"num_latents": 3, "d_latents": 16, "d_model": 16}
    | {"num_blocks": 1, "num_self_attends_per_block": 1, "num_self_attention_heads": 2}
    | {"num_cross_attention_heads": 2, "vocab_size": 48, "max_position_embeddings": 32}
    | {"num_labels": 3},
    "SwinForImageClassification": _IMAGE
    | {"embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 2},
}
TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 32, "depth": 1, "embed_dim": 16, "num_heads": 2},
    "resnet18": {"layers": [1, 1], "channels": [4, 8]},
    "convnext_atto": {"depths": [1] * 4, "dims": [8, 8, 16, 16]},
    "mobilenetv3_small_050": {},
}
DIFFUSERS: dict[str, dict[str, Any]] = {
    "DiTTransformer2DModel": {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1}
    | {"sample_size": 4, "num_embeds_ada_norm": 4, "norm_num_groups": 2},
    "UNet2DModel": {"block_out_channels": (8, 8), "norm_num_groups": 4, "layers_per_block": 1}
    | {"down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
    | {"up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 4},
    "FluxTransformer2DModel": {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16}
    | {"num_attention_heads": 2, "joint_attention_dim": 8, "pooled_projection_dim": 8}
    | {"in_channels": 4, "axes_dims_rope": (4, 4, 8)},
}


def of_transformers(name: str) -> nn.Module:
    cls = getattr(import_module("transformers"), name)
    model: nn.Module = cls(cls.config_class(**TRANSFORMERS[name]))
    return model


def of_timm(name: str) -> nn.Module:
    model: nn.Module = import_module("timm").create_model(name, num_classes=5, **TIMM[name])
    return model


def of_diffusers(name: str) -> nn.Module:
    model: nn.Module = getattr(import_module("diffusers"), name)(**DIFFUSERS[name])
    return model


LIBRARIES: dict[str, tuple[Callable[[str], nn.Module], dict[str, Any]]] = {
    "transformers": (of_transformers, TRANSFORMERS),
    "timm": (of_timm, TIMM),
    "diffusers": (of_diffusers, DIFFUSERS),
}


def routing_of(library: str, name: str) -> dict[str, str]:
    """Return a model's routing by kind of parameter and, by number, what else is logged.

    Convolutions of image models are flattened.
    """
    model = LIBRARIES[library][0](name)
    fields = {"optimizer": "muon", "lr": 0.1, "weight_decay": 0.1, "clip_grad": 0.0}
    fields |= {"print_optimizer_routing": True, "muon_convolutions": library != "transformers"}
    config = EmergingOptimizerConfig(**fields)
    with listening() as lines:
        build_optimizer(model, config)
    (table,) = (text for text in lines if text.startswith("optimizer routing"))
    logged = (_kind(text) for text in lines if text is not table)
    return {**dict(_rows(table)), **{f"log {n}": text for n, text in enumerate(logged)}}


def _rows(table: str) -> Iterator[tuple[str, str]]:
    """Yield the kind of each parameter, and what the table says about it."""
    for line in (line for line in table.splitlines()[3:] if line.startswith("|")):
        name, _, optimizer, split, _, decay, why = (cell.strip() for cell in line.split("|")[1:-1])
        yield _kind(name.partition(" ")[0]), f"{optimizer} | {split} | {decay} | {why}"


def _kind(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


if __name__ == "__main__":
    found = yaml.safe_load(EXPECTED.read_text()) if EXPECTED.exists() else {}
    for library, (_, models) in LIBRARIES.items():
        try:
            import_module(library)
        except ImportError:
            continue
        found[library] = {name: routing_of(library, name) for name in models}
    EXPECTED.write_text(yaml.safe_dump(found, sort_keys=False, width=1000))
