"""Runs of the quickstart with other flags, for benchmarks that compare what they end with.

A run has a folder of its own. Its log grows where it is interrupted and gone on with, so that the
log has all of a run.
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
    """A run that ended before its last step; the message has the end of its log."""


def train(
    folder: Path, steps: int, flags: Sequence[str], processes: int = quickstart.PROCESSES
) -> None:
    """Train the quickstart in ``folder``, or go on with it from its checkpoint.

    The corpus is beside the folder, where all runs find it.

    Args:
        folder: For all that the run writes.
        steps: How many the run has.
        flags: Of the trainer, after the quickstart's own, so they win.
        processes: How many train together.

    Raises:
        KeyboardInterrupt: If the user interrupted the run, which has saved then.
        RunError: If it failed.
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
    """Return the held-out losses of a run by step; none if it has not begun."""
    found = HELD_OUT.findall(_log(folder))
    return dict(sorted((int(step), float(loss)) for step, loss in dict(found).items()))


def seconds_per_step(folder: Path) -> float:
    """Return the median over the steps of a run, without the first, which sets up."""
    found = [float(ms) / 1000 for step, ms in STEP_TIME.findall(_log(folder)) if int(step) > 1]
    return statistics.median(found) if found else float("nan")


def _log(folder: Path) -> str:
    log = folder / "training.log"
    return log.read_text() if log.exists() else ""
