"""Stages of real layers have all weights of an architecture, on any layout, and are built fast."""

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.dry_run import dry_world
from megatron_eopt.plan.architectures import PUBLISHED, Architecture, Experts, LatentAttention
from megatron_eopt.plan.model import Layout, build_stage, initialize, stage_kinds, stages
from tests.harness import run_ranks

DENSE = Architecture("dense", 3, 32, 48, 4, 2, 16, 64)
MIXED = replace(DENSE, num_layers=4, experts=Experts(4, 24, 2, 40, (0, 1, 1, 1)))
LATENT = LatentAttention(12, 8, 6, 4, 8)
CUT = Layout(tensor=2, pipeline=2, data=2)
ALONE = Layout()
CASES = {
    "dense": (DENSE, CUT),
    "not gated, tied": (replace(DENSE, gated=False, untied=False), CUT),
    "biases and norms": (replace(DENSE, add_qkv_bias=True, qk_layernorm=True), CUT),
    "fewer groups than ranks": (replace(DENSE, num_query_groups=1), CUT),
    "experts": (MIXED, replace(CUT, expert=2)),
    "experts that are not cut": (MIXED, replace(CUT, expert=2, expert_tensor=1)),
    "latent": (replace(MIXED, latent=LATENT, qk_layernorm=True), replace(CUT, expert=2)),
    "latent, queries at once": (replace(DENSE, latent=replace(LATENT, q_lora_rank=None)), CUT),
    "no dense layer to cut": (
        replace(DENSE, ffn_hidden_size=47, experts=Experts(4, 24, 2)),
        replace(CUT, expert=2),
    ),
    "one rank": (replace(MIXED, latent=LATENT), ALONE),
    "instances": (DENSE, replace(CUT, instances=2)),
}


def elements(model: torch.nn.Module) -> int:
    """Return how many elements this rank holds of which no rank before it has copies."""
    tensor, data = parallel_state.get_tensor_model_parallel_rank(), _data(expert=False)
    expert_data, last = _data(expert=True), parallel_state.is_pipeline_last_stage()
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


def _data(*, expert: bool) -> int:
    if expert:
        return int(parallel_state.get_expert_data_parallel_rank())
    return int(parallel_state.get_data_parallel_rank())


def built(architecture: Architecture, layout: Layout) -> list[tuple[int, list[Any]]]:
    """Return what each rank counts, and the kinds of its layers."""
    dist.destroy_process_group()
    found = []
    for rank in range(layout.world_size):
        with dry_world(rank, layout.world_size):
            initialize(layout)
            model = build_stage(architecture, layout)
            kinds = [type(layer.mlp).__name__ for layer in model.module.decoder.layers]
            found.append((elements(model), kinds))
            assert torch.get_default_dtype() == torch.float32
    return found


@pytest.mark.parametrize("name", CASES)
def test_all_stages_together_are_the_architecture(name):
    architecture, layout = CASES[name]
    ranks = run_ranks(1, built, architecture, layout, cpu=False)[0]
    assert sum(count for count, _ in ranks) == architecture.total_parameters
    for stage, layers in enumerate(stages(architecture, layout)):
        expected = ["MoELayer" if architecture.moe_layers[layer] else "MLP" for layer in layers]
        assert ranks[layout.first_rank(stage)][1] == expected


LARGE = Layout(tensor=1, pipeline=16, data=256, expert=64)


def large_stages() -> tuple[list[Counter[str]], float]:
    """Build one stage of each kind of DeepSeek-V3, as 4,096 ranks have them."""
    dist.destroy_process_group()
    found, started = [], time.perf_counter()
    for first, *_ in stage_kinds(PUBLISHED["DeepSeek-V3"], LARGE):
        with dry_world(LARGE.first_rank(first), LARGE.world_size):
            initialize(LARGE)
            model = build_stage(PUBLISHED["DeepSeek-V3"], LARGE)
            sizes: Counter[str] = Counter()
            for name, param in model.named_parameters():
                sizes["experts" if "local_experts" in name else "others"] += param.numel()
            found.append(sizes)
    return found, (time.perf_counter() - started) / len(found)


def test_a_stage_of_thousands_of_ranks_is_built_in_seconds():
    assert stage_kinds(PUBLISHED["DeepSeek-V3"], LARGE) == [(0,), tuple(range(1, 15)), (15,)]
    (first, middle, last), seconds = run_ranks(1, large_stages, cpu=False)[0]
    expert = 3 * 7168 * 2048
    assert [sizes["experts"] // expert for sizes in (first, middle, last)] == [4, 16, 4]
    others = first["others"] + 14 * middle["others"] + last["others"]
    routed = 58 * 256 * expert
    assert others + routed == PUBLISHED["DeepSeek-V3"].total_parameters
    assert seconds < 60


def test_the_last_stage_has_what_is_left():
    assert stages(replace(DENSE, num_layers=10), Layout(pipeline=4))[-1] == range(9, 10)
    assert stages(replace(DENSE, num_layers=8), Layout(pipeline=4))[-1] == range(6, 8)
    assert stages(DENSE, ALONE) == [range(3)]


def test_equal_stages_are_found():
    shape = replace(DENSE, num_layers=8)
    assert stage_kinds(shape, ALONE) == [(0,)]
    assert stage_kinds(shape, Layout(pipeline=2)) == [(0,), (1,)]
    assert stage_kinds(shape, Layout(pipeline=8)) == [(0,), (1, 2, 3, 4, 5, 6), (7,)]
    mixed = replace(shape, experts=Experts(2, 24, 1, None, 3))
    assert stage_kinds(mixed, Layout(pipeline=8)) == [(0,), (1, 2, 4, 5), (3, 6), (7,)]


def test_sizes_of_a_layout():
    layout = Layout(tensor=2, pipeline=3, data=8, expert=4, expert_tensor=1, instances=2)
    assert (layout.world_size, layout.stage_size, layout.expert_data) == (48, 16, 4)
    assert layout.first_rank(2) == 32
    assert Layout(tensor=4).expert_tensor == 4


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"tensor": 0}, "tensor=0"),
        ({"data": 4, "expert": 3}, "expert * expert_tensor=3: must divide the ranks of a stage, 4"),
        ({"data": 4, "instances": 3}, "instances=3: must divide the data-parallel size, 4"),
        ({"data": 4, "expert": 4, "instances": 2}, "instances=2: must divide the data-parallel"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(sizes, named):
    with pytest.raises(ConfigurationError) as refused:
        Layout(**sizes)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("shape", "layout", "named"),
    [
        (DENSE, Layout(pipeline=4), "Take 3 stages"),
        (DENSE, Layout(tensor=8), "tensor=8: must divide num_attention_heads"),
        (replace(DENSE, vocab_size=63), Layout(tensor=2), "tensor=2: must divide vocab_size"),
        (DENSE, Layout(data=2, expert=2), "expert=2: must be 1"),
        (MIXED, Layout(data=3, expert=3), "expert=3: must divide the number of experts"),
        (replace(MIXED, latent=replace(LATENT, kv_lora_rank=9)), Layout(tensor=2), "kv_lora_rank"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(shape, layout, named):
    with pytest.raises(ConfigurationError) as refused:
        build_stage(shape, layout)
    assert named in str(refused.value)
