"""Run the step of one rank of a large job, as it is, beside its plan and other optimizers.

``megatron-eopt replay --stock`` does the work: with ours, with Adam, and with megatron-core's Muon.
"""

import contextlib
import io
import json
from typing import Any

from benchmarks.gpu_check.context import Context, Outcome
from megatron_eopt.tools.command import main

JOBS = {"Llama-3-8B, TP 8 x DP 64": ["--model", "llama-3-8b", "--tp", "8", "--dp", "64"]}
SMALL_JOBS = {
    "Llama-3-8B, TP 2 x DP 4, 1/64": [
        *("--model", "llama-3-8b", "--num-layers", "2", "--tp", "2", "--dp", "4"),
        *("--scale", "1/64"),
    ]
}
OTHERS = ("adam", "stock")
"""Keys of other optimizers' runs."""


def run(context: Context) -> Outcome:
    """Replay the busiest rank of every job; its counts must be those of the plan."""
    outcome, told = context.outcome, []
    for name, arguments in (SMALL_JOBS if context.small else JOBS).items():
        with outcome.noting(name):
            outcome.figures[name] = found = replayed(arguments)
            if not found["counts_agree"]:
                outcome.problems.append(f"{name}: kernels, bytes or calls are not the plan's")
            outcome.problems += [
                f"{name}, {other}: {found[other]['left_out']}"
                for other in OTHERS
                if "left_out" in found[other]
            ]
            told.append(f"{name}: {_headline(found)}")
    outcome.headline = "; ".join(told)
    return outcome


def replayed(arguments: list[str]) -> dict[str, Any]:
    """Return what ``megatron-eopt replay`` prints as JSON."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["replay", *arguments, "--stock", "--json"])
    if status:
        raise RuntimeError(err.getvalue())
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def _headline(found: dict[str, Any]) -> str:
    runs = {"ours": found, **{other: found[other] for other in OTHERS}}
    steps = (
        f"{name} {1e3 * one['seconds']['step']:.3g}"
        for name, one in runs.items()
        if "seconds" in one
    )
    return f"ms of a step: {', '.join(steps)}, ours planned {1e3 * found['planned']['step']:.3g}"
