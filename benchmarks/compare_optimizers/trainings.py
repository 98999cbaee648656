"""Train the runs that a folder lacks; finished runs are read from it."""

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from benchmarks.compare_optimizers.grid import InputError, Run
from benchmarks.files import write_whole
from benchmarks.machine import commit
from benchmarks.quickstart_runs import Curve, RunError, held_out_losses, seconds_per_step, train

EVALUATIONS = 10
"""Number of evaluations on held-out text per run."""

DIVERGED = re.compile(r"Unexpected result (nan|inf)|found (NaN|Inf)", re.IGNORECASE)


@dataclass(frozen=True)
class Settings:
    """Settings that all runs of a folder share.

    Attributes:
        steps: Training steps per run.
        processes: Ranks per run.
        flags: The user's flags for the trainer.
    """

    steps: int
    processes: int
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        run: The run.
        held_out: Held-out losses in nats per byte, by step.
        step_seconds: Median seconds per step.
        diverged: Whether it ended early because a loss or gradient was inf or nan.
        commit: Commit of the code that trained it.
    """

    run: Run
    held_out: Curve
    step_seconds: float
    diverged: bool = False
    commit: str | None = None

    @property
    def last(self) -> float:
        """The final held-out loss; infinite if the run diverged."""
        return math.inf if self.diverged else self.held_out[max(self.held_out)]


def claim(out: Path, settings: Settings) -> None:
    """Record the settings of ``out``'s runs.

    Raises:
        InputError: If the folder has runs with other settings.
    """
    file = out / "settings.json"
    wanted = json.loads(json.dumps(dataclasses.asdict(settings)))
    # neither file exists after a call with a mistyped flag, which may then be corrected
    begun = any([*out.rglob("result.json"), *out.rglob("latest_checkpointed_iteration.txt")])
    own = {field.name for field in dataclasses.fields(Settings)}
    if file.exists() and json.loads(file.read_text()).keys() != own:
        raise InputError(f"--out {out}: its settings.json is of other runs; pass another folder")
    if not (file.exists() and begun):
        out.mkdir(parents=True, exist_ok=True)
        _write(file, wanted)
    elif (found := json.loads(file.read_text())) != wanted:
        had = f"--steps {found['steps']} --processes {found['processes']}"
        had = " ".join([had, *found["flags"]])
        raise InputError(f"--out {out}: has runs of {had}; pass these flags or another folder")


def train_all(out: Path, settings: Settings, runs: Sequence[Run]) -> list[Result]:
    """Return the results of all runs, in order; train those that are not finished.

    Raises:
        KeyboardInterrupt: If the user stopped a run, which has saved and resumes next time.
        RunError: If a run failed.
    """
    results = []
    with tqdm(runs, desc="Runs", unit="run", disable=None) as bar:
        for run in bar:
            bar.set_postfix_str(run.name)
            result = done(out, run)
            if result is None:
                result = _trained(out, settings, run)
                bar.write(f"{run.name}: {describe(result)}")
            results.append(result)
    return results


def describe(result: Result) -> str:
    """Return a run's result in a few words."""
    if result.diverged:
        return "diverged"
    return f"held-out loss {result.last:.4f}, {result.step_seconds:.3f} s per step"


def done(out: Path, run: Run) -> Result | None:
    """Return the saved result of a run, or None."""
    file = out / run.name / "result.json"
    if not file.exists():
        return None
    found = json.loads(file.read_text())
    held_out = {int(step): loss for step, loss in found["held_out"].items()}
    return Result(run, held_out, found["step_seconds"], found["diverged"], found.get("commit"))


def _trained(out: Path, settings: Settings, run: Run) -> Result:
    folder = out / run.name
    interval = str(max(1, settings.steps // EVALUATIONS))
    flags = [*run.flags(), "--eval-interval", interval, "--save-interval", str(settings.steps)]
    diverged = False
    try:
        train(folder, settings.steps, [*flags, *settings.flags], settings.processes)
    except RunError:
        if not DIVERGED.search((folder / "training.log").read_text()):
            raise
        diverged = True
    result = Result(run, held_out_losses(folder), seconds_per_step(folder), diverged, commit())
    written = dataclasses.asdict(result)
    del written["run"]
    _write(folder / "result.json", written)
    # a checkpoint takes 50 MB, and a finished run needs none
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return result


def _write(file: Path, document: object) -> None:
    write_whole(file, json.dumps(document, indent=1) + "\n")
