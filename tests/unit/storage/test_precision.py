"""bf16 and fp16: main weights in fragments, one loss scale for dense and experts' parameters."""

import math
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.unit.storage.runs import (
    BF16,
    DENSE,
    FP16,
    MOE,
    Run,
    deviation,
    inject,
    make_chunk,
    make_optimizer,
    train,
    weights,
)


@pytest.mark.parametrize("grad_reduce_in_fp32", [True, pytest.param(False, marks=pytest.mark.long)])
def test_bf16_equals_one_stock_process(grad_reduce_in_fp32):
    ddp = {"grad_reduce_in_fp32": grad_reduce_in_fp32}
    expected = run_ranks(1, train, Run(optimizer="stock", ddp=ddp, **BF16))[0]
    results = run_ranks(2, train, Run(ddp=ddp, **BF16))
    # main weights agree to 1e-7; where one lies on the edge between two bf16 numbers the model's
    # weight may differ by 2^-8, which is 1e-4 of a matrix if one element in a thousand does
    assert deviation(results, expected) < 1e-4


def scaled_run(plan: list[tuple[int, int | None]]) -> dict[str, Any]:
    """Step with the gradients of ``(step, overflow)``: an inf is put on rank ``overflow``."""
    run = Run(model=MOE | {"dtype": torch.float16}, config=FP16, parallel={"ep": 2})
    chunk = make_chunk(run)
    optimizer = make_optimizer(run, chunk)
    told = []
    for step, overflow in plan:
        optimizer.zero_grad()
        inject(run, chunk, step)
        scale = float(optimizer.get_loss_scale())
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            buffer.grad_data.mul_(scale)
        if overflow is not None and torch.distributed.get_rank() == overflow:
            # expert parallelism leaves these to one rank alone
            chunk.expert_parallel_buffers[0].grad_data.fill_(math.inf)
        done, norm, _ = optimizer.step()
        told.append((done, norm, float(optimizer.get_loss_scale())))
    return {"told": told, "weights": weights(run, chunk)}


def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale():
    with_overflow = run_ranks(2, scaled_run, [(0, None), (1, 1), (2, None), (3, None)])
    without = run_ranks(2, scaled_run, [(0, None), (2, None), (3, None)])
    for rank, (result, clean) in enumerate(zip(with_overflow, without, strict=True)):
        done, norms, scales = zip(*result["told"], strict=True)
        assert done == (True, False, True, True)
        assert norms[1] is None
        # halved once although two buffer sets share it; doubled after a window of two good steps
        assert scales == (1024.0, 512.0, 512.0, 1024.0)
        assert norms[2] == pytest.approx(clean["told"][1][1], rel=1e-3)
        for name, (_, weight) in result["weights"].items():
            other = clean["weights"][name][1].float()
            # gradients were scaled by other powers of two, and the smallest are rounded in fp16
            # only where the model's weights are: main weights are float32
            assert (weight.float() - other).norm() < 1e-4 * other.norm(), (rank, name)


def test_fp16_equals_one_process_in_float32():
    run = {"steps": 3, "config": {}}
    expected = run_ranks(1, train, Run(model=MOE, **run))[0]
    plan = [(step, None) for step in range(3)]
    for result in run_ranks(2, scaled_run, plan):
        for name, (slab, weight) in result["weights"].items():
            reference = slab.of(expected.weights[name][1])
            # fp16 has 11 bits, for the start values as for the result
            assert (weight.float() - reference).norm() < 1e-3 * reference.norm(), name


def constant_scale() -> float:
    run = Run(model=DENSE | {"dtype": torch.bfloat16}, config={"bf16": True, "loss_scale": 8.0})
    chunk = make_chunk(run)
    optimizer = make_optimizer(run, chunk)
    inject(run, chunk, 0)
    for buffer in chunk.buffers:
        buffer.grad_data.mul_(8.0)
    return float(optimizer.step()[1])


def test_a_constant_loss_scale_is_taken_out_of_all_gradients():
    plain = run_ranks(2, train, Run(**BF16))
    scaled = run_ranks(2, constant_scale)
    assert scaled == pytest.approx([result.steps[0][1] for result in plain], rel=1e-6)
