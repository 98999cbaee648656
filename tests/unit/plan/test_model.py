"""Stages of real layers have all weights of an architecture, on any layout."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.tools.dry_run import dry_world
from megatron_eopt.tools.plan.architectures import Architecture
from megatron_eopt.tools.plan.model import ParallelLayout, build_stage, stage_kinds, stages
from tests.harness import models
from tests.harness.each_rank import on_ranks
from tests.harness.tiers import mostly_long

DENSE = Architecture(
    "dense",
    64,
    {
        "num_layers": 3,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "gated_linear_unit": True,
    },
)


def changed(architecture: Architecture, **fields: Any) -> Architecture:
    return replace(architecture, fields={**architecture.fields, **fields})


MIXED = changed(
    DENSE,
    num_layers=4,
    num_moe_experts=4,
    moe_ffn_hidden_size=24,
    moe_router_topk=2,
    moe_shared_expert_intermediate_size=40,
    moe_layer_freq=[0, 1, 1, 1],
)
LATENT = {name: models.LATENT[name] for name in models.LATENT if name.endswith(("rank", "dim"))}
LATENT["num_query_groups"] = 4
CUT = ParallelLayout(tensor=2, pipeline=2, data=2)
ALONE = ParallelLayout()
CASES = {
    "not gated, tied": (replace(changed(DENSE, gated_linear_unit=False), untied=False), CUT),
    "biases and norms": (changed(DENSE, add_qkv_bias=True, qk_layernorm=True), CUT),
    "fewer groups than ranks": (changed(DENSE, num_query_groups=1), CUT),
    "experts that are not cut": (MIXED, replace(CUT, expert=2, expert_tensor=1)),
    "latent": (changed(MIXED, **LATENT, qk_layernorm=True), replace(CUT, expert=2)),
    "full queries": (changed(DENSE, **{**LATENT, "q_lora_rank": None}, qk_layernorm=True), CUT),
    "instances": (DENSE, replace(CUT, instances=2)),
}


def elements(model: torch.nn.Module) -> int:
    """Return how many elements this rank holds of which no rank before it has copies."""
    tensor = parallel_state.get_tensor_model_parallel_rank()
    data = parallel_state.get_data_parallel_rank()
    expert_data = parallel_state.get_expert_data_parallel_rank()
    last = parallel_state.is_pipeline_last_stage()
    found = 0
    for name, param in model.named_parameters():
        assert param.dtype == torch.bfloat16
        expert = not getattr(param, "allreduce", True)
        whole = not getattr(param, "tensor_model_parallel", False)
        # an embedding that is the output layer's weight, too
        copy = getattr(param, "shared_embedding", False) and "output_layer" in name and last
        first = expert_data == 0 if expert else data == 0 and not (whole and tensor)
        found += param.numel() if first and not copy else 0
    return found


def built(architecture: Architecture, layout: ParallelLayout) -> list[tuple[int, list[str]]]:
    """Return what each rank counts, and the kinds of its layers."""
    found = []
    for rank in range(layout.world_size):
        with dry_world(rank, layout.world_size):
            model = build_stage(architecture, layout)
            kinds = [type(layer.mlp).__name__ for layer in model.module.decoder.layers]
            found.append((elements(model), kinds))
            assert torch.get_default_dtype() == torch.float32
    return found


@pytest.mark.parametrize("name", mostly_long(CASES, "experts that are not cut", "latent"))
@on_ranks(1, cpu=False)
def test_all_stages_together_are_the_model_of_one_rank(name):
    dist.destroy_process_group()
    architecture, layout = CASES[name]
    ranks, [alone] = (built(architecture, one) for one in (layout, ALONE))
    assert sum(count for count, _ in ranks) == alone[0]
    for stage, layers in enumerate(stages(architecture, layout)):
        expected = ["MoELayer" if architecture.moe_layers[layer] else "MLP" for layer in layers]
        assert ranks[layout.first_rank(stage)][1] == expected


def test_the_last_stage_has_what_is_left():
    assert stages(changed(DENSE, num_layers=10), ParallelLayout(pipeline=4))[-1] == range(9, 10)
    assert stages(changed(DENSE, num_layers=8), ParallelLayout(pipeline=4))[-1] == range(6, 8)
    assert stages(DENSE, ALONE) == [range(3)]


def test_equal_stages_are_found():
    shape = changed(DENSE, num_layers=8)
    assert stage_kinds(shape, ALONE) == [(0,)]
    assert stage_kinds(shape, ParallelLayout(pipeline=2)) == [(0,), (1,)]
    assert stage_kinds(shape, ParallelLayout(pipeline=8)) == [(0,), (1, 2, 3, 4, 5, 6), (7,)]
    mixed = changed(MIXED, num_layers=8, moe_layer_freq=3)
    assert stage_kinds(mixed, ParallelLayout(pipeline=8)) == [(0,), (1, 2, 4, 5), (3, 6), (7,)]


@pytest.mark.parametrize(
    ("shape", "layout", "named"),
    [
        (DENSE, ParallelLayout(pipeline=4), "pipeline=4: must leave a layer for each stage"),
        (DENSE, ParallelLayout(tensor=8), "does not fit dense: "),
        (replace(DENSE, vocab_size=63), ParallelLayout(tensor=2), "63 is not divisible by 2"),
        (DENSE, ParallelLayout(data=4, expert=3), "does not fit dense: "),
        (DENSE, ParallelLayout(data=4, instances=3), "does not fit dense: "),
        (DENSE, ParallelLayout(data=2, expert=2), "does not fit dense: "),
        (MIXED, ParallelLayout(data=3, expert=3), "does not fit dense: "),
        (changed(MIXED, moe_layer_freq=[1] * 5), ALONE, "does not fit dense: "),
        (changed(MIXED, **{**LATENT, "kv_lora_rank": 9}), ParallelLayout(tensor=2), "does not fit"),
    ],
)
@on_ranks(1, cpu=False)
def test_layouts_that_do_not_fit_are_refused(shape, layout, named):
    dist.destroy_process_group()
    with dry_world(0, layout.world_size), pytest.raises(ConfigurationError, match=named):
        build_stage(shape, layout)
