"""Estimates of passes follow the published formulas, and their parts add up."""

import math
from dataclasses import replace
from typing import Any

import pytest
from megatron.training.theoretical_memory_usage import compute_activation_memory

from megatron_eopt.tools.plan.architectures import Architecture
from megatron_eopt.tools.plan.machine import MACHINES
from megatron_eopt.tools.plan.model import ParallelLayout, train_flops, trainer_args
from megatron_eopt.tools.plan.passes import Passes, passes
from megatron_eopt.tools.recipe import NAMES, recipe
from tests.unit.plan.test_model import DENSE, changed

H100 = MACHINES["H100"]


def estimated(architecture: Architecture, layout: ParallelLayout, **given: Any) -> Passes:
    usual = {"tokens": 64 * architecture.seq_length, "micro_batch": 1, "room": math.inf}
    return passes(architecture, layout, H100, **usual | given)


@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("layout", [(1, 1), (1, 8), (2, 4), (8, 1)], ids=str)
def test_activations_are_megatrons_where_its_formula_knows_the_model(layout, micro):
    gpt = changed(DENSE, num_layers=24, num_query_groups=4, kv_channels=8, ffn_hidden_size=128)
    gpt = changed(gpt, gated_linear_unit=False)
    args = trainer_args(gpt)
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = layout
    args.micro_batch_size, args.virtual_pipeline_model_parallel_size = micro, None
    expected = compute_activation_memory(args, 64 // micro)
    found = estimated(gpt, ParallelLayout(*layout), micro_batch=micro)
    # theirs has token numbers and the embedding's dropout, too
    assert found.kept == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_estimates_of_published_models(name):
    model = recipe(name).architecture()
    whole = estimated(model, ParallelLayout())
    seconds = train_flops(model, 64 * model.seq_length) / (H100.flops * H100.utilization)
    assert whole.compute == pytest.approx(seconds)
    assert (whole.traffic, whole.bubble) == (0, 0)
    # inputs of layers, all of one layer, and logits
    assert 0 < whole.recomputed < whole.kept / 4
    again = estimated(model, ParallelLayout(), room=whole.kept - 1)
    assert again.compute == pytest.approx(whole.compute * 4 / 3)
    assert (whole.activations, again.activations) == (whole.kept, whole.recomputed)
    cut = estimated(model, ParallelLayout(tensor=2, data=4))
    assert cut.compute == pytest.approx(whole.compute / 8)
    assert cut.kept == pytest.approx(whole.kept / 2)
    assert cut.traffic > 0
    expert = model.moe_layers[-1]
    spread = estimated(model, ParallelLayout(data=64, expert=64 if expert else 1))
    assert (spread.traffic > 0) == expert
    # a stage waits for all others once, at the start and the end together
    piped = estimated(model, ParallelLayout(pipeline=4, data=2))
    assert piped.bubble == pytest.approx((piped.compute + piped.traffic) * 3 / 32)
    # stages are uneven
    assert piped.compute >= whole.compute / 8


def test_ranks_without_a_sequence_wait():
    few = estimated(DENSE, ParallelLayout(data=256), tokens=64 * DENSE.seq_length)
    assert few.compute == estimated(DENSE, ParallelLayout(data=64)).compute


def test_the_stage_of_the_output_layer_may_be_the_slowest():
    large = replace(changed(DENSE, num_layers=8), vocab_size=8192, seq_length=64)
    small = replace(large, vocab_size=64)
    alone, cut = ParallelLayout(), ParallelLayout(pipeline=8)
    shares = [estimated(it, cut).compute / estimated(it, alone).compute for it in (small, large)]
    assert shares[0] < 1.2 / 8
    assert shares[1] > 2 / 8
