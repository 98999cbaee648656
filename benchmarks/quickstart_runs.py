"""Run the quickstart with other flags, for benchmarks that compare the resulting losses.

Each run has its own folder. A resumed run appends to its log, so the log covers the whole run.
"""

import re
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

from scripts import quickstart

HELD_OUT = re.compile(r"validation loss at iteration (\d+)(?!.*test set).*?lm loss value: (\S+)")
STEP_TIME = re.compile(r"iteration +(\d+)/.*?elapsed time per iteration \(ms\): (\S+)")

type Curve = dict[int, float]
"""Held-out losses in nats per byte, by step."""


class RunError(RuntimeError):
    """A run failed before its last step; the message contains the end of its log."""


def train(
    folder: Path, steps: int, flags: Sequence[str], processes: int = quickstart.PROCESSES
) -> None:
    """Train the quickstart in ``folder``, or resume it from its checkpoint.

    The corpus is in the parent folder, which all runs share.

    Args:
        folder: Folder for the checkpoints and logs of the run.
        steps: Number of training steps.
        flags: Trainer flags that override the quickstart's.
        processes: Number of ranks.

    Raises:
        KeyboardInterrupt: If the user interrupted the run, after it has saved a checkpoint.
        RunError: If the run failed.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    corpus = quickstart.corpus_beside(folder)
    try:
        quickstart.prepare_corpus(corpus)
    except subprocess.CalledProcessError as error:
        raise RunError(f"{corpus}: the corpus could not be prepared") from error
    own = [*quickstart.model_flags(), *quickstart.training_flags(steps, processes, folder, corpus)]
    log = folder / "training.log"
    code, interrupted = quickstart.train([*own, *flags], log, processes=processes, quiet=True)
    if interrupted:
        raise KeyboardInterrupt
    if code:
        end = "\n".join(log.read_text().splitlines()[-40:])
        raise RunError(f"{end}\n{folder.name} failed (exit code {code}); its output is in {log}")


def held_out_losses(folder: Path) -> Curve:
    """Return the held-out losses of a run by step; empty if it has not started."""
    found = HELD_OUT.findall(_log(folder))
    return dict(sorted((int(step), float(loss)) for step, loss in dict(found).items()))


def seconds_per_step(folder: Path) -> float:
    """Return the median seconds of a step, without the first step, which includes setup."""
    found = [float(ms) / 1000 for step, ms in STEP_TIME.findall(_log(folder)) if int(step) > 1]
    return statistics.median(found) if found else float("nan")


def _log(folder: Path) -> str:
    log = folder / "training.log"
    return log.read_text() if log.exists() else ""
