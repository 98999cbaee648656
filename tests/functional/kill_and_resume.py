"""Kill one rank again and again while a run trains and saves; compare with an undisturbed run.

    python -m tests.functional.kill_and_resume --kills 10 --folder /tmp/killed

torchrun starts two ranks of scripts/pretrain_gpt.py on CPUs. ``kill -9`` hits one of them: while it
starts, between any two instructions of training, or while a checkpoint is being written, the first
one of the run among these. The same command starts the run again, which must load the checkpoint
that Megatron's tracker file names. In the end the loss of every iteration, however often it was
computed, and every saved state must be those of the undisturbed run.
"""

import argparse
import contextlib
import dataclasses
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.functional.processes import all_processes, environment_of, parent_of, rank_of
from tests.functional.saved_states import differing
from tests.functional.script import ROOT, SCRIPT, TINY

TRACKER = "latest_checkpointed_iteration.txt"
"""What Megatron writes last, once a checkpoint is whole."""

FINISHED = "metadata.json"
"""What megatron-core writes last into the folder of a checkpoint."""

SAVE_INTERVAL = 2
RANKS = 2
MARK = "EOPT_KILL_AND_RESUME"
"""Environment variable by which the processes of a run are found, orphans among them."""

ROUNDING = 4e-6
"""Of a loss that is printed as a mean of two; see :func:`read`."""

RUN = """
    --optimizer muon --use-distributed-optimizer --ckpt-format torch_dist
    --hidden-dropout 0.1 --attention-dropout 0.1
""".split()

KindT = Literal["save", "step", "start"]
"""When a process is killed: while a checkpoint is written, in training, or before it."""


@dataclass(frozen=True)
class Kill:
    """When to kill which rank.

    Attributes:
        kind: What the run is doing then.
        after: Saves that begin, or iterations that are printed, before.
        delay: Seconds between that and the kill.
        rank: Rank to kill.
    """

    kind: KindT
    after: int
    delay: float
    rank: int


@dataclass
class Attempt:
    """What one start of the run has printed.

    Attributes:
        losses: By iteration.
        means: The same for the iteration that is printed as a mean with the one before.
        loaded: Iteration it went on from; 0 for none.
    """

    losses: dict[int, float] = field(default_factory=dict)
    means: dict[int, float] = field(default_factory=dict)
    loaded: int = 0


@dataclass
class Report:
    """What was seen.

    Attributes:
        kills: The kills, in order.
        loaded: What each further start went on from; 0 for none.
        unfinished: How many kills left a checkpoint that is not whole.
        iterations: How many iterations were computed, those of the undisturbed run apart.
        problems: Whatever differs from the undisturbed run or went wrong.
    """

    kills: list[Kill] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)
    unfinished: int = 0
    iterations: int = 0
    problems: list[str] = field(default_factory=list)


def plan(kills: int, seed: int) -> list[Kill]:
    """Return random kills; the first one hits the first save, and about half hit one."""
    chance = random.Random(seed)
    kinds: list[KindT] = ["save"]
    while len(kinds) < kills:
        kinds += chance.sample(["save", "save", "step", "step", "start"], 5)
    limits: dict[KindT, tuple[int, float]] = {"save": (2, 0.06), "step": (5, 0.4), "start": (0, 9)}
    return [
        Kill(
            kind,
            0 if number == 0 else chance.randint(0, limits[kind][0]),
            chance.uniform(0, limits[kind][1]),
            (number + seed) % RANKS,
        )
        for number, kind in enumerate(kinds[:kills])
    ]


def read(output: str) -> Attempt:
    """Return what a start of the run has printed.

    The trainer's second line covers the first two steps of a process: their mean is printed.
    """
    attempt = Attempt()
    if found := re.search(r"successfully loaded checkpoint .* at iteration +(\d+)", output):
        attempt.loaded = int(found[1])
    lines = re.findall(r"iteration +(\d+)/ .*\| lm loss: (\S+) \|", output)
    for place, (iteration, loss) in enumerate(lines):
        into = attempt.means if place == 1 else attempt.losses
        into[int(iteration)] = float(loss)
    return attempt


def differences(expected: Attempt, seen: Attempt) -> Iterator[str]:
    """Yield what an attempt has computed otherwise than the undisturbed run."""
    losses = whole_losses(expected)
    for iteration, loss in seen.losses.items():
        # the one loss that the undisturbed run prints as part of a mean is known to its rounding
        exact = iteration not in expected.means
        if abs(loss - losses[iteration]) > (0 if exact else ROUNDING * loss):
            yield f"loss of iteration {iteration}: {loss} instead of {losses[iteration]}"
    for iteration, mean in seen.means.items():
        right = (losses[iteration - 1] + losses[iteration]) / 2
        if abs(mean - right) > ROUNDING * mean:
            yield f"mean loss up to iteration {iteration}: {mean} instead of {right}"


def other_states(expected: Path, seen: Path) -> Iterator[str]:
    """Yield which checkpoints of two finished runs differ."""
    for folder in sorted(expected.glob("iter_*")):
        if keys := differing(folder, seen / folder.name):
            yield f"{folder.name} differs: {', '.join(keys[:3])}"


def whole_losses(attempt: Attempt) -> dict[int, float]:
    """Return the losses with the mean of two taken apart."""
    apart = {i: 2 * mean - attempt.losses[i - 1] for i, mean in attempt.means.items()}
    return attempt.losses | apart


class Start:
    """One start of the run, all of whose processes end with the ``with`` block.

    Args:
        folder: Of the checkpoints.
        iterations: Of the whole run.
        log: File for what it prints.
    """

    def __init__(self, folder: Path, iterations: int, log: Path) -> None:
        self.folder = folder
        self._log = log
        self._name = uuid.uuid4().hex
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(SCRIPT)]
        command += [*TINY, *RUN, "--train-iters", str(iterations)]
        command += ["--save", str(folder), "--load", str(folder)]
        command += ["--save-interval", str(SAVE_INTERVAL)]
        environment = {"MEGATRON_EOPT_DEVICE": "cpu", "PYTHONUNBUFFERED": "1", MARK: self._name}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
            )

    def __enter__(self) -> "Start":
        return self

    def __exit__(self, *_: object) -> None:
        for _ in range(100):
            left = self.processes()
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.poll()
            if not left:
                return
            time.sleep(0.05)

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self, timeout: float) -> int:
        return self._process.wait(timeout)

    def kill(self, kill: Kill, timeout: float) -> bool:
        """Wait for the moment and kill; return False if the run has ended before."""
        if not self.reaches(kill, timeout):
            return False
        time.sleep(kill.delay)
        victims = [pid for pid in self.processes() if rank_of(pid) == kill.rank]
        # the rank itself; what it has started is not its torchrun's child
        victims = [pid for pid in victims if parent_of(pid) == self._process.pid]
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return True

    def reaches(self, kill: Kill, timeout: float) -> bool:
        """Wait for the moment of ``kill``; return False if the run has ended before."""
        return self._until(self._moment(kill), timeout)

    def _moment(self, kill: Kill) -> Callable[[], bool]:
        """Return what tells whether it is time for ``kill``."""
        if kill.kind == "start":
            return lambda: any(rank_of(pid) == kill.rank for pid in self.processes())
        if kill.kind == "step":
            return lambda: len(re.findall(r"lm loss: ", self.output())) > kill.after
        before = _saves(self.folder).items()
        begun: set[str] = set()

        def saving() -> bool:
            # a folder that a killed save has left changes when files are written anew
            begun.update(name for name, _ in _saves(self.folder).items() - before)
            return len(begun) > kill.after

        return saving

    def _until(self, happened: Callable[[], bool], timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if happened():
                return True
            if self._process.poll() is not None:
                return False
            time.sleep(0.004)
        raise TimeoutError(f"waited {timeout:g} s for the moment to kill\n{self.output()[-3000:]}")

    def processes(self) -> list[int]:
        """Return what runs of this start, torchrun and what ranks have started among it."""
        mark = f"{MARK}={self._name}".encode()
        return [pid for pid in all_processes() if mark in environment_of(pid)]


def _saves(folder: Path) -> dict[str, int]:
    """Return when the folders of unfinished checkpoints were last changed, by name."""
    found = {}
    for path in folder.glob("iter_*"):
        with contextlib.suppress(FileNotFoundError):
            if not (path / FINISHED).exists():
                found[path.name] = path.stat().st_mtime_ns
    return found


def newest_whole(folder: Path) -> int:
    """Return what must be loaded: what the tracker names, or 0 without one."""
    tracker = folder / TRACKER
    return int(tracker.read_text()) if tracker.exists() else 0


def kill_and_resume(
    folder: Path, kills: Sequence[Kill], iterations: int, timeout: float, say: Callable[[str], None]
) -> Report:
    """Do the undisturbed run and the one that is killed, and compare them.

    Args:
        folder: Empty folder for checkpoints and what the runs print.
        kills: When to kill which rank.
        iterations: Of the whole run.
        timeout: Seconds until one start of the run counts as hanging.
        say: Called with a line on every step.

    Raises:
        TimeoutError: If a start of the run hangs.
        RuntimeError: If one fails by itself.
    """
    report = Report()
    expected = _to_the_end(folder / "undisturbed", iterations, folder / "undisturbed.log", timeout)
    say(f"undisturbed: {len(whole_losses(expected))} iterations")
    place = folder / "killed"
    for number, planned in enumerate(kills):
        due = newest_whole(place)
        kill = _possible(planned, iterations - due)
        with Start(place, iterations, folder / f"killed_{number:02d}.log") as start:
            if not start.kill(kill, timeout):
                raise RuntimeError(f"it ended by itself:\n{start.output()[-3000:]}")
            try:
                code = start.wait(timeout)
            except subprocess.TimeoutExpired:
                raise TimeoutError("torchrun does not end after a rank was killed") from None
            attempt = read(start.output())
        if code == 0:
            report.problems.append(
                f"start {number} ended well although rank {kill.rank} was killed"
            )
        report.kills.append(kill)
        unfinished = len(_saves(place))
        report.unfinished += bool(unfinished)
        _compare(report, expected, attempt, due, number)
        say(
            f"{number + 1}/{len(kills)}: rank {kill.rank} killed at {kill.kind} {kill.after} + "
            f"{kill.delay:.3f} s; from {attempt.loaded}, {len(attempt.losses)} iterations, "
            f"{unfinished} unfinished checkpoint(s)"
        )
    due = newest_whole(place)
    last = _to_the_end(place, iterations, folder / "last.log", timeout)
    _compare(report, expected, last, due, len(kills))
    if max(whole_losses(last), default=0) != iterations:
        report.problems.append("the last start has not reached the end")
    report.problems += other_states(folder / "undisturbed", place)
    say(f"finished from iteration {last.loaded}: {len(report.problems)} problem(s)")
    return report


def _possible(kill: Kill, left: int) -> Kill:
    """Return ``kill``, earlier if so few iterations are left that it would not come."""
    limits: dict[KindT, int] = {"save": left // SAVE_INTERVAL - 1, "step": left - 2, "start": 0}
    return dataclasses.replace(kill, after=max(0, min(kill.after, limits[kill.kind])))


def _to_the_end(folder: Path, iterations: int, log: Path, timeout: float) -> Attempt:
    with Start(folder, iterations, log) as start:
        if start.wait(timeout) != 0:
            raise RuntimeError(f"the run failed:\n{start.output()[-5000:]}")
        return read(start.output())


def _compare(report: Report, expected: Attempt, seen: Attempt, due: int, number: int) -> None:
    report.iterations += len(seen.losses) + len(seen.means)
    if seen.losses:
        report.loaded.append(seen.loaded)
        if seen.loaded != due:
            report.problems.append(f"start {number} went on from {seen.loaded}, not from {due}")
    report.problems += [f"start {number}: {text}" for text in differences(expected, seen)]


def main() -> int:
    """Run and print; the exit status is 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10, help="how often to kill a rank")
    parser.add_argument("--seed", type=int, default=1, help="decides the moments and the ranks")
    parser.add_argument("--iterations", type=int, default=60, help="of the whole run")
    parser.add_argument("--folder", type=Path, help="empty folder for all files; kept")
    parser.add_argument(
        "--timeout", type=float, default=600, help="seconds until a start counts as hanging"
    )
    given = parser.parse_args()
    _say(f"seed {given.seed}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        kills = plan(given.kills, given.seed)
        report = kill_and_resume(folder, kills, given.iterations, given.timeout, _say)
    for problem in report.problems:
        _say(problem)
    if not report.problems:
        _say("all losses and states are those of the undisturbed run")
    return bool(report.problems)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
