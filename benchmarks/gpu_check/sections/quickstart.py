"""Run the quickstart over NCCL, with a GPU for each process."""

import os
import re
import shutil
import subprocess
import sys

from benchmarks.gpu_check.context import Context, Outcome
from benchmarks.machine import ROOT

STEPS, SMALL_STEPS = 40, 8
SMALL = "--num-layers 1 --hidden-size 64 --ffn-hidden-size 128 --eval-iters 1".split()
FALL = 0.05
"""Minimum decrease of the loss, as a share of the first one."""

_ITERATION = re.compile(
    r"iteration +(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: (\S+)"
)


def run(context: Context) -> Outcome:
    """Train, and check the losses that the trainer prints."""
    out = context.folder / "run"
    # otherwise it would resume from its checkpoint
    shutil.rmtree(out, ignore_errors=True)
    steps = SMALL_STEPS if context.small else STEPS
    command = [sys.executable, str(ROOT / "scripts" / "quickstart.py"), "--steps", str(steps)]
    command += ["--processes", str(context.ranks), "--out", str(out)]
    environment = {**os.environ, "MEGATRON_EOPT_DEVICE": context.device}
    done = subprocess.run([*command, *(SMALL if context.small else [])], env=environment, cwd=ROOT)
    if done.returncode:
        return Outcome(problems=[f"the quickstart ended with exit code {done.returncode}"])
    return judged((out / "training.log").read_text(), steps)


def judged(log: str, steps: int) -> Outcome:
    """Check that a training log has all steps and that the loss falls.

    Args:
        log: The trainer's output.
        steps: Expected number of steps.
    """
    found = [(float(loss), float(ms)) for _, ms, loss in _ITERATION.findall(log)]
    losses = [loss for loss, _ in found]
    if len(losses) != steps:
        return Outcome(problems=[f"{steps} steps were asked for, {len(losses)} are in the log"])
    milliseconds = sorted(ms for _, ms in found)[len(found) // 2]
    problems = []
    # in this form, nan is a problem too
    if not losses[-1] <= (1 - FALL) * losses[0]:
        problems.append(f"the loss went from {losses[0]:.4f} to {losses[-1]:.4f}")
    headline = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {milliseconds:.0f} ms a step"
    return Outcome(headline, {"losses": losses, "milliseconds": milliseconds}, problems)
