"""Capture orthogonalization in a CUDA graph; replays on new values must equal plain calls."""

from itertools import product

import torch
from torch import Tensor

from benchmarks.gpu_check.context import Context, Outcome
from megatron_eopt.math import Orthogonalization, PrecisionT
from megatron_eopt.math.algorithm import AlgorithmT

SHAPES = ((1024, 4096), (4096, 1024), (8, 512, 2048))
SMALL_SHAPES = ((64, 256), (256, 64), (4, 32, 128))
ALGORITHMS: tuple[AlgorithmT, ...] = ("standard", "gram")

TOLERANCES: dict[PrecisionT, float] = {"highest": 1e-5, "medium": 2e-2}
"""Largest relative deviation; during capture, a library may choose a kernel with another order of
summation."""


def run(context: Context) -> Outcome:
    """Compare replays with plain calls, for both forms, both precisions, wide, tall and stacked."""
    if context.device == "cpu":
        return Outcome(skipped="a CPU has no CUDA graphs")
    outcome = Outcome()
    deviations: dict[str, float] = {}
    shapes = SMALL_SHAPES if context.small else SHAPES
    for precision, algorithm, shape in product(TOLERANCES, ALGORITHMS, shapes):
        name = f"{precision}, {algorithm}, {'x'.join(map(str, shape))}"
        compute = Orthogonalization(algorithm=algorithm, precision=precision)
        with outcome.noting(name):
            deviations[name] = found = deviation(compute, shape)
            # in this form, nan is a problem too
            if not found <= TOLERANCES[precision]:
                outcome.problems.append(f"{name}: a replay deviates by {found:.1e}")
    equal = sum(found == 0 for found in deviations.values())
    outcome.headline = f"{len(deviations)} graphs replayed, {equal} with equal bits"
    outcome.figures = {"deviations": deviations}
    return outcome


def deviation(compute: Orthogonalization, shape: tuple[int, ...]) -> float:
    """Return the relative deviation of a replay from a plain call on the same numbers."""
    captured = torch.randn(shape, device="cuda")
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
