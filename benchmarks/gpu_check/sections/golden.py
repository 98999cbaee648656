"""Compare the metrics of functional test cases with committed values, or record new ones."""

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.gpu_check.context import Context, Outcome
from tests.functional import golden
from tests.functional.case_files import Case, Environment, load_cases
from tests.functional.comparer import differences_from, spread_of
from tests.functional.metrics import Metrics
from tests.functional.runner import run_measured
from tests.harness import close_pools

ON_CPU = "dense-one-rank"
FIRST = (ON_CPU, "dense", "layer-wise", "tp")
"""The most important cases, which run first in case the time is short."""

CORES_OF_A_RUN = 2
"""CPU cores per rank, which are busy because imports take most of a run's time."""


def run(context: Context) -> Outcome:
    """Compare or record cases until the time is up."""
    environment: Environment = "gpu_nccl" if context.device == "cuda" else "cpu_gloo"
    until = time.monotonic() + context.seconds
    outcome, told, longest = Outcome(), [], 0.0
    for case in cases_of(environment, context.ranks, small=context.small):
        began = time.monotonic()
        # do not start a case that could exceed the time limit
        if began + 1.25 * longest > until:
            outcome.left.append(case.name)
            continue
        with outcome.noting(case.name):
            told.append(_take(case, environment, context, outcome))
            print(told[-1], flush=True)
        longest = max(longest, time.monotonic() - began)
    close_pools()
    outcome.headline = f"{golden.place_of(environment)}: {'; '.join(told)}"
    return outcome


def cases_of(environment: Environment, ranks: int, *, small: bool) -> list[Case]:
    """Return the cases that can run, the most important ones first; only one if ``small``."""
    cases = [
        case
        for case in load_cases().values()
        if case.kind == "golden" and environment in case.environments and case.ranks <= ranks
    ]
    cases.sort(key=lambda case: FIRST.index(case.name) if case.name in FIRST else len(FIRST))
    return cases[:1] if small else cases


def _take(case: Case, environment: Environment, context: Context, outcome: Outcome) -> str:
    """Compare a case with its committed values, or record it; return a line about it."""
    if golden.path_of(case.name, environment).exists():
        kept = golden.read(case, environment)
        found = run_measured(case, environment, None)
        wrong = differences_from(kept, found)
        outcome.problems += [f"{case.name}: {sentence}" for sentence in wrong]
        outcome.figures[case.name] = {"compared": not wrong, "metrics": found}
        return f"{case.name} {'differs' if wrong else 'as committed'}"
    path = golden.path_of(case.name, environment, context.folder)
    if path.exists():
        # recorded by an earlier call, which ran out of time
        outcome.figures[case.name] = {"recorded": json.loads(path.read_text())}
        return f"{case.name} recorded before"
    seeds = [None, *range(1, golden.SEEDS + 1)]
    plain, *others = runs_of(case, environment, seeds)
    spread = spread_of(plain, others)
    path = golden.write(case, environment, plain, spread, context.folder)
    outcome.figures[case.name] = {"recorded": json.loads(path.read_text())}
    return f"{case.name} recorded, losses stray by {spread['lm loss'][-1]:.0e}"


def runs_of(case: Case, environment: Environment, seeds: Sequence[int | None]) -> list[Metrics]:
    """Return the metrics of a run for each seed that perturbs the last bits of weights.

    On GPUs, as many runs start at once as the CPU cores allow.
    """
    at_once = max(1, (os.cpu_count() or 1) // (CORES_OF_A_RUN * case.ranks))
    with ThreadPoolExecutor(at_once if environment == "gpu_nccl" else 1) as threads:
        return list(threads.map(lambda seed: run_measured(case, environment, seed), seeds))
