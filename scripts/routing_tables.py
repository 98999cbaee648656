"""Makes docs/reference/routing.md, with the routing tables of two small models.

``python -m scripts.reference_pages`` writes the page.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.config.settings import resolve
from megatron_eopt.optimizers import built_in as _built_in  # noqa: F401  registers optimizers
from megatron_eopt.routing.model import format_routing, overrides_for, route_model

COMMON: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "add_bias_linear": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "normalization": "RMSNorm",
}
GATED = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
MODELS: dict[str, tuple[type, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "GPT, grouped-query attention, gated experts": (
        TransformerConfig,
        {
            "num_query_groups": 2,
            "num_moe_experts": 2,
            "moe_ffn_hidden_size": 96,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "alltoall",
            **GATED,
        },
        {"num_experts": 2},
        {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False},
    ),
    "Multi-latent attention": (
        MLATransformerConfig,
        {
            "multi_latent_attention": True,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_head_dim": 16,
            "qk_pos_emb_head_dim": 8,
            "v_head_dim": 16,
            "rope_type": "rope",
            **GATED,
        },
        {"multi_latent_attention": True},
        {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False},
    ),
}

INTRODUCTION = """\
# Parameter routing

This page says which parameter gets which optimizer, and how you change that. Add
`--print-optimizer-routing` to print such a table of your own model.

| parameter | optimizer |
|---|---|
| 2-D weights, MoE routers included | the one you chose with `--optimizer`, here `muon` |
| embeddings (learned positions too), output layer | scalar |
| 1-D parameters: norms, biases | scalar |
| parameters with `use_muon = False` | scalar; `--muon-ignore-use-muon` changes it |
| 3-D expert weights (`--moe-single-grouped-weight`) | scalar, with a warning |

Other PyTorch models have latents, positions, experts and layers of many kinds:
[one table](../how_to/pytorch.md#who-gets-what) says who gets what there.

The scalar optimizer is `adam`, or what `--muon-scalar-optimizer` says.
`--no-muon-orthogonalize-router` sends routers there too. To give each expert's matrix of a 3-D
weight to Muon, set `param.eopt_split = "whole"`, or `megatron_eopt.matrices.gated(param.shape)` if
gate and up are fused.

An override sends any parameter to any registered optimizer, with its own settings:

```python
from megatron.core.optimizer import ParamKey, get_standard_config_overrides

overrides = get_standard_config_overrides(config)
overrides[ParamKey(name="*.linear_proj.weight")] = {"optimizer": "soap", "max_lr": 1e-3}
optimizer = megatron_eopt.get_megatron_optimizer(config, model_chunks, overrides)
```

`get_megatron_optimizer` takes overrides in place of the standard ones, which keep weight decay off
norms and biases. `fsdp2.build_optimizer` adds yours to the standard ones. An override with
`weight_decay` or `wd_mult` holds for all that its key matches, norms and biases too: to give them
weight decay there, pass `{ParamKey(name="*"): {"wd_mult": 1}}`.

A setting belongs to the scheduler or to the optimizer of its parameters:

| setting | with Megatron's scheduler | with `fsdp2.build_optimizer` |
|---|---|---|
| `lr`, `max_lr` | peak learning rate | learning rate |
| `lr_mult` | multiplies `max_lr` and `min_lr` | multiplies the learning rate |
| `min_lr` | lowest learning rate | raises an error: your scheduler decides |
| `weight_decay` | constant weight decay (`start_wd` and `end_wd`) | weight decay |
| `start_wd`, `end_wd` | first and last weight decay | only if both are equal |
| `wd_mult` | multiplies weight decay | multiplies weight decay |
| the optimizer's arguments (`eps`, `momentum`, `nesterov`) | of these parameters | the same |

All other settings raise `ConfigurationError`: misspelled ones, those that the optimizer of the
parameters lacks, and arguments that belong to the run, such as `tp_mode`. Names count layers and
experts over the whole model: `*.layers.3.*` is the fourth layer at any pipeline size. The last
stage's copy of a tied embedding has the name of the embedding.

The tables below show two small models with the recommended defaults and megatron-core's standard
overrides. The second lists only kinds of parameters that the first does not have.
`python -m scripts.reference_pages` writes this page.
"""


def table_of(title: str) -> str:
    """Return the Markdown table of one of :data:`MODELS`."""
    config_cls, fields, spec, options = MODELS[title]
    layer = get_gpt_layer_local_spec(**spec)
    # Core attention has no parameters, and that of multi-latent attention needs Transformer Engine.
    layer.submodules.self_attention.submodules.core_attention = IdentityOp
    model = GPTModel(
        config=config_cls(**(COMMON | fields)),
        transformer_layer_spec=layer,
        vocab_size=128,
        max_sequence_length=32,
        **options,
    )
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.001, weight_decay=0.1)
    settings = resolve(config)
    overrides = overrides_for(settings, None)
    return format_routing(settings, route_model(settings, [model], overrides))


def shortened(tables: Iterable[str]) -> Iterator[str]:
    """Yield the tables without parameters that only differ in their layer or expert number."""
    shown: set[str] = set()
    for table in tables:
        # without the line of sums
        head, rule, *rows = table.splitlines()[:-2]
        new = []
        for row in rows:
            kind = re.sub(r"\.\d+\.", ".", row.split()[1])
            if kind not in shown:
                shown.add(kind)
                new.append(row)
        yield "\n".join([head, rule, *new])


def page() -> str:
    """Return the whole page; needs a process group."""
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    tables = zip(MODELS, shortened(table_of(title) for title in MODELS), strict=True)
    return "\n".join([INTRODUCTION, *(f"## {title}\n\n{table}\n" for title, table in tables)])
