"""Clipped, stepped, clipped: the same weights in every layout and storage."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.optimizer import qk_clip as megatrons

from megatron_eopt.qk_clip import clip_qk
from megatron_eopt.qk_clip.attention import attentions
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import assert_same, copies_of
from tests.unit.storage import runs
from tests.unit.storage.full_state import Case, build, optimizer_over, steps, unwrapped
from tests.unit.storage.runs import Result, Run, make_chunk

GROUPED = {"layers": 2, "hidden": 32, "heads": 4, "query_groups": 2, "bias": True}
LATENT = {"layers": 2, "hidden": 32, "heads": 4, "latent": True, "position_embedding": "rope"}
THRESHOLD = 10.0
MODEL = {"qk_clip": True, "qk_clip_alpha": 0.4, "qk_clip_threshold": THRESHOLD}

# of each layer and head, before each clip; the first head of the second group decides for both
MAXIMA = (
    ((5.0, 20.0, 9.0, 10.0), (-3.0, 0.0, 40.0, 12.0)),
    ((11.0, 5.0, 30.0, 2.0), (1.0, 2.0, 3.0, 4.0)),
)


def case_of(model: dict[str, Any], **fields: Any) -> Case:
    return Case("muon", {**model, **MODEL}, **fields)


def put(chunks: list[Any], maxima: Any) -> None:
    """Let attention have recorded its heads' maxima, smaller ones on other data-parallel ranks."""
    rank, size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    data = parallel_state.get_data_parallel_rank()
    for chunk in chunks:
        for attention in attentions(chunk):
            of_layer = maxima[(attention.layer_number - 1) % len(maxima)]
            mine = torch.tensor(of_layer).chunk(size)[rank]
            # another rank's tokens have the larger logits of every other head
            seen = torch.where(torch.arange(len(mine)) % 2 == data % 2, mine, mine - 1)
            attention.core_attention.current_max_attn_logits = (
                seen if parallel_state.get_data_parallel_world_size() > 1 else mine
            )


def clipped(case: Case, clip: Any = clip_qk, gathers_first: bool = True) -> Result:
    """Do a step and a clip, twice."""
    chunk, optimizer = build(case)
    return stepped_and_clipped([(case.run, chunk)], optimizer, clip, gathers_first)


def stepped_and_clipped(
    parts: list[tuple[Run, Any]], optimizer: Any, clip: Any = clip_qk, gathers_first: bool = True
) -> Result:
    """Return what clips returned as steps, and whether main weights round to all model weights."""
    chunks = [chunk for _, chunk in parts]
    returned = []
    for step, maxima in enumerate(MAXIMA):
        optimizer.zero_grad()
        for run, chunk in parts:
            runs.inject(run, chunk, step)
        optimizer.step()
        for chunk in chunks:
            if chunk.ddp_config.overlap_param_gather and gathers_first:
                chunk.start_param_sync(force_sync=True)
        put(chunks, maxima)
        returned.append(clip(chunks))
        optimizer.gather_params(now=True)
    mains = {item.param: item for member in optimizer.steppers for item in member.storage.stored()}
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
    return Result(weights, returned, all(exact))


def deviation(results: list[Any], expected: Any) -> float:
    """Return the largest relative deviation of a weight; all ranks together have every weight."""
    assert {name for result in results for name in result.weights} == expected.weights.keys()
    return runs.deviation(results, expected)


SHARDED = {"use_distributed_optimizer": True}
PLAIN = {"use_distributed_optimizer": False}
OVERLAPPED = {**SHARDED, "overlap_param_gather": True, "overlap_grad_reduce": True}
LAYOUTS = {
    "DP 2": (2, {}),
    "TP 2": (2, {"tp": 2}),
    "PP 2": (2, {"pp": 2}),
    "TP 2 x DP 2": (4, {"tp": 2}),
    # tensor parallelism cuts query groups apart
    "TP 4": (4, {"tp": 4}),
}


def with_dtype(model: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {**model, "dtype": dtype}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(
            model,
            layout,
            id=f"{name} {layout}",
            # the usual tests have the layout that cuts in both ways, and the harder attention
            marks=[] if (name, layout) == ("MLA", "TP 2 x DP 2") else pytest.mark.long,
        )
        for name, model in (("GQA", GROUPED), ("MLA", LATENT))
        for layout in LAYOUTS
        # the local attention wants a whole query group on each rank
        if (name, layout) != ("GQA", "TP 4")
    ],
)
def test_every_layout_clips_as_one_process_does(model, layout):
    world, parallel = LAYOUTS[layout]
    for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        case = case_of(with_dtype(model, dtype))
        alone = replace(case, ddp=PLAIN, config=PLAIN)
        expected = run_ranks(1, clipped, alone)[0]
        assert expected.steps == [40.0, 30.0]
        for ddp in (SHARDED, PLAIN):
            here = replace(case, parallel=parallel, ddp=ddp, config=ddp)
            results = run_ranks(world, clipped, here)
            assert {tuple(result.steps) for result in results} == {(40.0, 30.0)}
            assert all(result.extra for result in results)
            assert deviation(results, expected) < bound


def test_off_loaded_weights_are_clipped_as_resident_ones():
    found = []
    for fraction in (0.0, 1.0):
        off_load = {"optimizer_cpu_offload": fraction > 0, "optimizer_offload_fraction": fraction}
        case = case_of(with_dtype(GROUPED, torch.bfloat16))
        found.append(run_ranks(2, clipped, replace(case, ddp=SHARDED, config=SHARDED | off_load)))
    for resident, off_loaded in zip(*found, strict=True):
        assert off_loaded.extra
        assert off_loaded.steps == resident.steps
        assert_same(off_loaded.tensors, resident.tensors)


def interleaved() -> Result:
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
    case = case_of({**GROUPED, "layers": 4}, ddp=PLAIN, config=PLAIN)
    expected = run_ranks(1, clipped, case)[0]
    results = run_ranks(2, interleaved)
    assert {tuple(result.steps) for result in results} == {(40.0, 30.0)}
    assert deviation(results, expected) < 2e-6


EXPERTS = {"layers": 1, "heads": 4, "query_groups": 2, "experts": 4, "moe_grouped_gemm": False}
INSTANCES = {**SHARDED, "num_distributed_optimizer_instances": 2}


@pytest.mark.parametrize(
    ("model", "world", "parallel", "ddp"),
    [
        pytest.param(EXPERTS, 2, {"ep": 2}, SHARDED, id="experts"),
        pytest.param(GROUPED, 4, {"optimizer_instances": 2}, INSTANCES, id="instances"),
    ],
)
def test_beside_experts_and_with_several_instances(model, world, parallel, ddp):
    case = case_of(with_dtype(model, torch.bfloat16))
    expected = run_ranks(1, clipped, replace(case, ddp=PLAIN, config=PLAIN))[0]
    here = replace(case, parallel=parallel, ddp=ddp, config=SHARDED)
    results = run_ranks(world, clipped, here)
    assert all(result.extra for result in results)
    assert deviation(results, expected) < 2e-2


@pytest.mark.parametrize("gathers_first", [True, False])
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16], ids=str
)
def test_parameters_may_be_gathered_before_or_after(dtype, gathers_first):
    case = case_of(with_dtype(GROUPED, dtype), ddp=SHARDED)
    expected = run_ranks(2, clipped, case)
    found = run_ranks(2, clipped, replace(case, ddp=OVERLAPPED), clip_qk, gathers_first)
    for mine, other in zip(found, expected, strict=True):
        assert_same(mine.tensors, other.tensors)
    assert all(result.extra for result in found)


@pytest.mark.parametrize("model", [GROUPED, LATENT], ids=["GQA", "MLA"])
def test_megatrons_own_where_it_works(model):
    # it stumbles over logits that are not positive
    positive = tuple(
        tuple(tuple(max(logit, 1.0) for logit in layer) for layer in maxima) for maxima in MAXIMA
    )
    case = replace(case_of(model), ddp=PLAIN, config=PLAIN)
    ours, theirs = run_ranks(1, side_by_side, case, positive)[0]
    assert_same(ours, theirs)


def side_by_side(case: Case, maxima: Any) -> Any:
    found = []
    for clip in (clip_qk, megatrons_clip):
        chunk, optimizer = build(case)
        for step, some in enumerate(maxima):
            steps(case, chunk, optimizer, step, step + 1)
            put([chunk], some)
            assert clip([chunk]) == max(map(max, some))
        found.append(copies_of(chunk))
    return found


def megatrons_clip(model: list[Any]) -> float:
    class Twice:
        """It looks for the model two wrappers down."""

        def __init__(self, module: Any) -> None:
            self.module = module

    return megatrons.clip_qk([Twice(Twice(unwrapped(chunk))) for chunk in model])


def what_stays() -> list[Any]:
    """Return what is found where nothing is to be clipped: no usable logits, or frozen weights."""
    case = case_of(GROUPED, ddp=SHARDED)
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 1)
    before = copies_of(chunk)
    found = [clip_qk([chunk])]
    first = next(attentions(chunk))
    for logits in ([-1.0, 0.0, -torch.inf, torch.nan], [torch.inf, 3.0, 2.0, 1.0]):
        first.core_attention.current_max_attn_logits = torch.tensor(logits)
        found.append(clip_qk([chunk]))
        assert first.core_attention.current_max_attn_logits is None
    first.core_attention.current_max_attn_logits = torch.full((4,), 50.0)
    found.append(clip_qk([chunk], log_max_only=True))
    assert_same(copies_of(chunk), before)

    chunk, _ = build(case_of(LATENT, ddp=PLAIN, config=PLAIN, frozen="self_attention"))
    before = copies_of(chunk)
    put([chunk], MAXIMA[0])
    assert clip_qk([chunk]) == max(map(max, MAXIMA[0]))
    assert_same(copies_of(chunk), before)
    return found


def test_what_has_no_usable_logits_or_is_frozen_stays():
    nothing, _, infinite, logged = run_ranks(1, what_stays)[0]
    assert nothing == 0.0
    assert infinite == float("inf")
    assert logged == 50.0
