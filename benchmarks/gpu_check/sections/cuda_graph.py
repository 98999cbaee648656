"""Capture orthogonalization and whole steps in CUDA graphs; replays must equal plain calls.

On a CPU, graphs of the tests' own replay the steps.
"""

from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import torch
from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper
from torch import Tensor

from benchmarks.gpu_check.context import Context, Outcome
from benchmarks.gpu_check.models import build, give_gradients
from megatron_eopt.base import gpu
from megatron_eopt.math import Orthogonalization, PrecisionT
from megatron_eopt.math.algorithm import AlgorithmT
from tests.harness.graphs import recorded_graphs
from tests.harness.scene import forget_megatron

SHAPES = ((1024, 4096), (4096, 1024), (8, 512, 2048))
SMALL_SHAPES = ((64, 256), (256, 64), (4, 32, 128))
ALGORITHMS: tuple[AlgorithmT, ...] = ("standard", "gram")

TOLERANCES: dict[PrecisionT, float] = {"highest": 1e-5, "medium": 2e-2}
"""Largest relative deviation; during capture, a library may choose a kernel with another order of
summation."""


OPTIMIZERS = ("muon", "adaptive_muon", "adam")
MODEL: dict[str, Any] = {"hidden": 64, "heads": 8, "query_groups": 4, "gated": True, "bias": True}
STEPS = 4


def run(context: Context) -> Outcome:
    """Compare replays with plain calls: of steps, then of orthogonalization in every form."""
    outcome = context.outcome
    for name, sharded in product(OPTIMIZERS, (True, False)):
        case = f"step of {name}, {'sharded' if sharded else 'replicated'}"
        with outcome.noting(case):
            differing = context.on_ranks(1, differing_tensors, name, sharded)[0]
            outcome.figures[case] = {"tensors that differ": differing}
            if differing:
                outcome.problems.append(f"{case}: {differing} tensors differ after replays")
    shapes = SMALL_SHAPES if context.small else SHAPES
    deviations: dict[str, float] = {}
    outcome.figures["deviations"] = deviations
    for precision, algorithm, shape in product(TOLERANCES, ALGORITHMS, shapes):
        name = f"{precision}, {algorithm}, {'x'.join(map(str, shape))}"
        compute = Orthogonalization(algorithm=algorithm, precision=precision)
        with outcome.noting(name):
            deviations[name] = found = context.on_ranks(1, deviation, compute, shape)[0]
            # in this form, nan is a problem too
            if not found <= TOLERANCES[precision]:
                outcome.problems.append(f"{name}: a replay deviates by {found:.1e}")
    equal = sum(found == 0 for found in deviations.values())
    outcome.headline = f"{len(deviations)} graphs replayed, {equal} with equal bits"
    return outcome


def _graphs() -> AbstractContextManager[Any]:
    """Return what makes CUDA graphs work on this rank's device."""
    return nullcontext() if gpu.is_there() else recorded_graphs()


def differing_tensors(name: str, sharded: bool) -> int:
    """Return how many weights and states of a captured run differ from those of plain steps."""
    plain, replayed = (stepped(name, sharded, captures=captures) for captures in (False, True))
    return sum(not torch.equal(a, b) for a, b in zip(plain, replayed, strict=True))


def stepped(name: str, sharded: bool, *, captures: bool) -> list[Tensor]:
    """Return weights and state after steps with changing rates, the second of them captured."""
    fields = {"optimizer": name, "use_distributed_optimizer": sharded}
    model = {**MODEL, "dtype": torch.bfloat16}
    chunk, optimizer = build(model, {**fields, "optimizer_cuda_graph": True, "clip_grad": 0.1})
    with _graphs():
        if captures:
            optimizer.step = OptimizerCudaGraphWrapper(optimizer.step)
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = 0.02 / (1 + step)
            give_gradients(chunk, step)
            optimizer.step()
        if captures:
            # the graph is the wrapper's class's
            del optimizer.step
            OptimizerCudaGraphWrapper.curr_iteration = 0
    items = [(link, item) for link in optimizer.chained_optimizers for item in link.main_shards()]
    found = [tensor for _, item in items for tensor in (item.param, item.main)]
    for link, item in items:
        state = link.optimizer.state[item.main]
        found += [value for value in state.values() if isinstance(value, Tensor)]
    copies = [tensor.detach().clone() for tensor in found]
    forget_megatron()
    return copies


def deviation(compute: Orthogonalization, shape: tuple[int, ...]) -> float:
    """Return the relative deviation of a replay from a plain call on the same numbers."""
    captured = torch.randn(shape, device="cuda")
    with _graphs():
        graph, result = capture(compute, captured)
    fresh = torch.randn(shape, device="cuda")
    expected = compute(fresh)
    captured.copy_(fresh)
    graph.replay()
    torch.cuda.synchronize()
    return float((result - expected).norm() / expected.norm())


def capture(compute: Orthogonalization, x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Return the graph of a call and the tensor that receives the result of replays."""
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        # libraries allocate handles and workspaces during the first calls
        for _ in range(3):
            compute(x)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = compute(x)
    return graph, result
