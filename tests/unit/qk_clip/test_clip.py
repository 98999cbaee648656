"""Clipped, stepped, clipped: the same weights in every layout and storage."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.optimizer import qk_clip as megatrons

from megatron_eopt.qk_clip import clip_qk
from megatron_eopt.qk_clip.attention import attentions
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.tiers import mostly_long
from tests.unit.storage import runs
from tests.unit.storage.full_state import Case, build, optimizer_over, steps, unwrapped
from tests.unit.storage.runs import OVERLAP, PLAIN, REPLICATED, SHARDED, Run, make_chunk

GROUPED = {"layers": 2, "hidden": 32, "heads": 4, "query_groups": 2, "bias": True}
LATENT = {"layers": 2, "hidden": 32, "heads": 4, "latent": True, "position_embedding": "rope"}
MODEL = {"qk_clip": True, "qk_clip_alpha": 0.4, "qk_clip_threshold": 10.0}

# of each layer and head, before each clip; the first head of the second group decides for both
MAXIMA = (
    ((5.0, 20.0, 9.0, 10.0), (-3.0, 0.0, 40.0, 12.0)),
    ((11.0, 5.0, 30.0, 2.0), (1.0, 2.0, 3.0, 4.0)),
)


@dataclass(frozen=True)
class Clipped:
    """What a rank has after clips and steps."""

    weights: dict[str, Any]
    returned: list[float]
    is_rounding: bool  # whether all model weights are those that the main ones round to
    is_everywhere: bool  # whether clips wrote all 16-bit weights of the model, other ranks' too


def case_of(model: dict[str, Any], **fields: Any) -> Case:
    return Case("muon", {**model, **MODEL}, **fields)


def put(chunks: list[Any], maxima: Any) -> None:
    """Let attention have recorded its heads' maxima, smaller ones on other data-parallel ranks."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    data = parallel_state.get_data_parallel_rank()
    for attention in (attention for chunk in chunks for attention in attentions(chunk)):
        of_layer = maxima[(attention.layer_number - 1) % len(maxima)]
        seen = mine = torch.tensor(of_layer).chunk(size)[rank]
        if parallel_state.get_data_parallel_world_size() > 1:
            # another rank's tokens have the larger logits of every other head
            seen = torch.where(torch.arange(len(mine)) % 2 == data % 2, mine, mine - 1)
        attention.core_attention.current_max_attn_logits = seen


def clipped(case: Case, gathers_first: bool = True) -> Clipped:
    chunk, optimizer = build(case)
    return stepped_and_clipped([(case.run, chunk)], optimizer, gathers_first)


def stepped_and_clipped(parts: Any, optimizer: Any, gathers_first: bool = True) -> Clipped:
    """Do a step and a clip, twice."""
    chunks = [chunk for _, chunk in parts]
    params = [param.detach() for chunk in chunks for param in chunk.parameters()]
    returned, is_everywhere = [], True
    for step, maxima in enumerate(MAXIMA):
        optimizer.zero_grad()
        for run, chunk in parts:
            runs.inject(run, chunk, step)
        optimizer.step()
        for chunk in chunks:
            if chunk.ddp_config.overlap_param_gather and gathers_first:
                chunk.start_param_sync(force_sync=True)
        put(chunks, maxima)
        returned.append(clip_qk(chunks))
        before = [param.clone() for param in params]
        optimizer.gather_params(now=True)
        is_everywhere &= all(
            torch.equal(param, its) or param.dtype == torch.float32
            for param, its in zip(params, before, strict=True)
        )
    mains = {item.param: item for member in optimizer.chained_optimizers for item in member.shards}
    exact = [
        torch.equal(
            param.detach().view(-1)[item.start : item.stop],
            item.main.detach().view(-1).to(param.dtype),
        )
        for param, item in mains.items()
    ]
    weights: dict[str, Any] = {}
    for run, chunk in parts:
        weights |= runs.weights(run, chunk)
    return Clipped(weights, returned, all(exact), is_everywhere)


def deviation(results: list[Any], expected: Any) -> float:
    """Return the largest relative deviation of a weight; all ranks together have every weight."""
    assert {name for result in results for name in result.weights} == expected.weights.keys()
    return runs.deviation(results, expected)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, (_, weight) in expected.items():
        assert torch.equal(found[name][1], weight), name


OVERLAPPED = {**SHARDED, **OVERLAP}
INSTANCES = {**SHARDED, "num_distributed_optimizer_instances": 2}
EXPERTS = {**GROUPED, "experts": 4, "moe_grouped_gemm": False, "bias": False}
LAYOUTS = {
    "GQA DP 2": (GROUPED, 2, {}),
    "GQA TP 2": (GROUPED, 2, {"tp": 2}),
    "GQA PP 2": (GROUPED, 2, {"pp": 2}),
    "GQA TP 2 x DP 2": (GROUPED, 4, {"tp": 2}),
    "MLA DP 2": (LATENT, 2, {}),
    "MLA TP 2": (LATENT, 2, {"tp": 2}),
    "MLA PP 2": (LATENT, 2, {"pp": 2}),
    "MLA TP 2 x DP 2": (LATENT, 4, {"tp": 2}),
    # tensor parallelism cuts query groups apart; for GQA the local attention wants them whole
    "MLA TP 4": (LATENT, 4, {"tp": 4}),
    "experts": (EXPERTS, 2, {"ep": 2}),
    "instances": (GROUPED, 4, {"optimizer_instances": 2}),
}
# the layout that cuts in both ways and the harder attention, and what they do not have
USUAL = ("MLA TP 2 x DP 2", "experts")


def assert_as_alone(case: Case, bound: float, *runs: list[Clipped]) -> None:
    """Compare what the ranks of each run have with what one process has."""
    expected = run_ranks(1, clipped, replace(case, parallel={}, **REPLICATED))
    for results in (expected, *runs):
        for result in results:
            assert result.returned == [40.0, 30.0]
            assert result.is_rounding
            assert result.is_everywhere
        assert deviation(results, expected[0]) < bound


@pytest.mark.parametrize("name", mostly_long(LAYOUTS, *USUAL))
def test_every_layout_clips_as_one_process_does(name):
    model, world, parallel = LAYOUTS[name]
    for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        case = case_of(model | {"dtype": dtype}, parallel=parallel)
        found = []
        for ddp in (INSTANCES,) if name == "instances" else (SHARDED, PLAIN):
            config = {"use_distributed_optimizer": ddp["use_distributed_optimizer"]}
            found.append(run_ranks(world, clipped, replace(case, ddp=ddp, config=config)))
        assert_as_alone(case, bound, *found)


@on_ranks(1)
def test_main_weights_of_the_later_optimizer_are_clipped():
    case = case_of(GROUPED | {"dtype": torch.bfloat16}, **REPLICATED)
    chunk, older = build(case)
    found = stepped_and_clipped([(case.run, chunk)], optimizer_over(case, [chunk]))
    assert older.superseded
    assert found.is_rounding
    assert_same(found.weights, clipped(case).weights)


def interleaved() -> Clipped:
    """Step and clip two model chunks on each of two pipeline stages."""
    initialize_megatron(pp=2, virtual_pp=2)
    parts = []
    for stage in range(2):
        parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        model = {**GROUPED, **MODEL, "layers": 4, "virtual_stage": stage}
        run = Run(model=model, ddp=OVERLAPPED)
        parts.append((run, make_chunk(run)))
    optimizer = optimizer_over(case_of(GROUPED, config=SHARDED), [chunk for _, chunk in parts])
    return stepped_and_clipped(parts, optimizer)


def test_an_interleaved_pipeline_clips_as_one_process_does():
    assert_as_alone(case_of({**GROUPED, "layers": 4}), 2e-6, run_ranks(2, interleaved))


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16], ids=str
)
def test_parameters_may_be_gathered_before_or_after(dtype):
    off_load = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    case = case_of(GROUPED | {"dtype": dtype}, ddp=SHARDED)
    expected = run_ranks(2, clipped, case)
    for way in (
        (replace(case, ddp=OVERLAPPED), True),
        (replace(case, ddp=OVERLAPPED), False),
        (replace(case, config=off_load), True),
    ):
        for mine, other in zip(run_ranks(2, clipped, *way), expected, strict=True):
            assert mine.is_rounding
            assert mine.returned == other.returned
            assert_same(mine.weights, other.weights)


@pytest.mark.parametrize("model", [GROUPED, LATENT], ids=["GQA", "MLA"])
@on_ranks(1)
def test_megatrons_own_where_it_works(model):
    # it stumbles over logits that are not positive
    positive = tuple(
        tuple(tuple(max(logit, 1.0) for logit in layer) for layer in maxima) for maxima in MAXIMA
    )
    case, found = replace(case_of(model), **REPLICATED), []
    for clip in (clip_qk, megatrons_clip):
        chunk, optimizer = build(case)
        for step, some in enumerate(positive):
            steps(case, chunk, optimizer, step, step + 1)
            put([chunk], some)
            assert clip([chunk]) == max(map(max, some))
        found.append(runs.weights(case.run, chunk))
    assert_same(*found)


def megatrons_clip(model: list[Any]) -> float:
    # it looks for the model two wrappers down
    inner = (SimpleNamespace(module=unwrapped(chunk)) for chunk in model)
    return megatrons.clip_qk([SimpleNamespace(module=wrapper) for wrapper in inner])


@on_ranks(1)
def test_what_has_no_usable_logits_or_is_frozen_stays():
    """Check what is found where nothing is to be clipped: no usable logits, or frozen weights."""
    case = case_of(GROUPED, ddp=SHARDED)
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 1)
    before = [param.detach().clone() for param in chunk.parameters()]
    assert clip_qk([chunk]) == 0.0
    first = next(attentions(chunk))
    for logits in ([-1.0, 0.0, -torch.inf, torch.nan], [torch.inf, 3.0, 2.0, 1.0]):
        first.core_attention.current_max_attn_logits = torch.tensor(logits)
        found = clip_qk([chunk])
        assert first.core_attention.current_max_attn_logits is None
    assert found == float("inf")
    first.core_attention.current_max_attn_logits = torch.full((4,), 50.0)
    assert clip_qk([chunk], log_max_only=True) == 50.0
    assert all(map(torch.equal, chunk.parameters(), before))

    chunk, _ = build(case_of(LATENT, **REPLICATED, frozen="self_attention"))
    before = [param.detach().clone() for param in chunk.parameters()]
    put([chunk], MAXIMA[0])
    assert clip_qk([chunk]) == max(map(max, MAXIMA[0]))
    assert all(map(torch.equal, chunk.parameters(), before))
