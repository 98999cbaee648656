"""Compare the updates from equal gradients at all layouts that fit the GPUs.

Two ranks share a single GPU.
"""

from benchmarks.gpu_check.context import Context, Outcome
from megatron_eopt.testing.scene import forget_megatron
from tests.unit.storage.full_state import Case, build, steps
from tests.unit.storage.runs import Result, deviation, weights

TOLERANCE = 1e-5
"""Largest relative deviation of a weight in float32. It exceeds that of CPUs, since a GPU's kernels
depend on the sizes of matrices."""

STEPS = 4
WORLDS = (1, 2, 4, 8)
LARGEST_TP = 4
MODEL = {"hidden": 64, "heads": 8, "query_groups": 4, "gated": True, "bias": True}
CONFIG = {"muon_fp32_matmul_prec": "highest", "clip_grad": 1.0, "weight_decay": 0.1}


def cases_of(world_size: int) -> dict[str, Case]:
    """Return the layouts of a number of ranks, by name."""
    cases = {}
    for tp in (1, 2, 4):
        if tp > min(LARGEST_TP, world_size):
            continue
        for storage in ("plain", "sharded"):
            is_sharded = {"use_distributed_optimizer": storage == "sharded"}
            name = f"TP {tp} x DP {world_size // tp}, {storage}"
            config = {**CONFIG, **is_sharded}
            cases[name] = Case("muon", MODEL, {"tp": tp}, is_sharded, config)
    return cases


def run(context: Context) -> Outcome:
    """Compare all layouts with the first, which has one rank."""
    outcome = context.outcome
    found: dict[str, float] = {}
    reference: Result | None = None
    for world in (size for size in WORLDS if size <= max(2, context.ranks)):
        cases = cases_of(world)
        with outcome.noting(f"{world} ranks"):
            ranks = context.on_ranks(world, results_of, list(cases.values()))
            reference = reference or ranks[0][0]
            for number, name in enumerate(cases):
                found[name] = deviation([results[number] for results in ranks], reference)
    outcome.figures = {"tolerance": TOLERANCE, "deviations": found}
    outcome.problems += [
        f"{name} deviates by {value:.1e}, {TOLERANCE:.0e} are allowed"
        for name, value in found.items()
        # in this form, nan is a problem too
        if not value <= TOLERANCE
    ]
    if found:
        outcome.headline = f"{len(found)} layouts deviate by at most {max(found.values()):.1e}"
    return outcome


def results_of(cases: list[Case]) -> list[Result]:
    """Return this rank's weights after the steps of each case, on the host."""
    results = []
    for case in cases:
        chunk, optimizer = build(case)
        steps(case, chunk, optimizer, 0, STEPS)
        places = weights(case.run, chunk).items()
        on_host = {name: (slab, value.cpu()) for name, (slab, value) in places}
        results.append(Result(on_host, []))
        forget_megatron()
    return results
