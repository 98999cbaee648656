"""``kill -9`` of a rank at random moments loses nothing but time.

One of two ranks is killed while it starts, trains or writes a checkpoint. The same command then
starts the run again, from the checkpoint that Megatron's tracker file names. In the end all losses
and saved states must be those of an undisturbed run.
"""

import contextlib
import os
import random
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.functional.saved_states import differing
from tests.functional.script import ROOT, SCRIPT, TINY
from tests.harness.long_results import record_faults

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

KILLS, ITERATIONS, SEED = 10, 60, 1
SAVE_INTERVAL = 2
RANKS = 2

TIMEOUT_S = 600.0
"""For one start of the run, which takes 15 seconds where nothing else runs."""

MARK = "EOPT_KILL_AND_RESUME"
"""Environment variable by which the processes of a run are found, orphans among them."""

RUN = """
    --optimizer muon --use-distributed-optimizer --ckpt-format torch_dist
    --hidden-dropout 0.1 --attention-dropout 0.1
""".split()

LIMITS = {"save": (2, 0.06), "step": (5, 0.4), "start": (0, 9)}
"""By what the run is doing when it is hit: how many saves or steps before, and seconds after."""


@dataclass(frozen=True)
class Kill:
    """When to kill which rank: so many saves or steps after the start, and seconds after that."""

    kind: str
    after: int
    delay: float
    rank: int


@dataclass
class Attempt:
    """What one start of the run has printed."""

    losses: dict[int, float]  # but for the second, which is printed as a mean with the first
    loaded: int  # iteration it went on from, or 0
    iterations: int  # how many it has done


def plan() -> list[Kill]:
    """Return random kills; the first one hits the first save, and about half hit one."""
    chance = random.Random(SEED)
    kinds = ["save"]
    while len(kinds) < KILLS:
        kinds += chance.sample(["save", "save", "step", "step", "start"], 5)
    kills = []
    for number, kind in enumerate(kinds[:KILLS]):
        most, seconds = LIMITS[kind]
        after = chance.randint(0, most) if number else 0
        kills.append(Kill(kind, after, chance.uniform(0, seconds), (number + SEED) % RANKS))
    return kills


def read(output: str) -> Attempt:
    """Return what a start has printed."""
    loaded = re.search(r"successfully loaded checkpoint .* at iteration +(\d+)", output)
    lines = re.findall(r"iteration +(\d+)/ .*\| lm loss: (\S+) \|", output)
    losses = {int(iteration): float(loss) for iteration, loss in lines[:1] + lines[2:]}
    return Attempt(losses, int(loaded[1]) if loaded else 0, len(lines))


class Start:
    """One start of the run, all of whose processes end with the ``with`` block."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder = folder
        self._log = log
        self._name = uuid.uuid4().hex
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(SCRIPT)]
        command += [*TINY, *RUN, "--save", str(folder), "--load", str(folder)]
        command += ["--train-iters", str(ITERATIONS), "--save-interval", str(SAVE_INTERVAL)]
        environment = {"MEGATRON_EOPT_DEVICE": "cpu", "PYTHONUNBUFFERED": "1", MARK: self._name}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        with log.open("w") as file:
            how = {"stdout": file, "stderr": subprocess.STDOUT, "env": os.environ | environment}
            self._process = subprocess.Popen(command, cwd=ROOT, **how)

    def __enter__(self) -> "Start":
        return self

    def __exit__(self, *_: object) -> None:
        for _ in range(100):
            left = self.processes()
            end(left)
            self._process.poll()
            if not left:
                return
            time.sleep(0.05)

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self) -> int:
        return self._process.wait(TIMEOUT_S)

    def kill(self, kill: Kill) -> None:
        """Wait for the moment and kill."""
        happened, deadline = self._moment(kill), time.monotonic() + TIMEOUT_S
        while not happened():
            assert self._process.poll() is None, f"it ended by itself:\n{self.output()[-3000:]}"
            assert time.monotonic() < deadline, f"it hangs:\n{self.output()[-3000:]}"
            time.sleep(0.004)
        time.sleep(kill.delay)
        # the rank itself; what it has started is not its torchrun's child
        children = psutil.Process(self._process.pid).children()
        end([process for process in children if is_rank(process, kill.rank)])

    def _moment(self, kill: Kill) -> Callable[[], bool]:
        """Return what tells whether it is time for ``kill``."""
        if kill.kind == "start":
            return lambda: any(is_rank(process, kill.rank) for process in self.processes())
        if kill.kind == "step":
            return lambda: len(re.findall(r"lm loss: ", self.output())) > kill.after
        before = unfinished(self.folder).items()
        begun: set[str] = set()

        def saving() -> bool:
            # a folder that a killed save has left changes when files are written anew
            begun.update(name for name, _ in unfinished(self.folder).items() - before)
            return len(begun) > kill.after

        return saving

    def processes(self) -> list[psutil.Process]:
        """Return what runs of this start, torchrun and what ranks have started among it."""
        return [p for p in psutil.process_iter() if environment_of(p).get(MARK) == self._name]


def environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def is_rank(process: psutil.Process, rank: int) -> bool:
    return environment_of(process).get("RANK") == str(rank)


def end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def unfinished(folder: Path) -> dict[str, int]:
    """Return when the folders of unfinished checkpoints were last changed, by name."""
    found = {}
    for path in folder.glob("unfinished.iter_*/new.*"):
        with contextlib.suppress(FileNotFoundError):
            found[path.name] = path.stat().st_mtime_ns
    return found


def newest_whole(folder: Path) -> int:
    """Return what must be loaded: what the tracker names, or 0 without one."""
    tracker = folder / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


def possible(kill: Kill, left: int) -> Kill:
    """Return ``kill``, earlier if so few iterations are left that it would not come."""
    limits = {"save": left // SAVE_INTERVAL - 1, "step": left - 2, "start": 0}
    return Kill(kill.kind, max(0, min(kill.after, limits[kill.kind])), kill.delay, kill.rank)


def to_the_end(folder: Path, log: Path) -> Attempt:
    with Start(folder, log) as start:
        assert start.wait() == 0, start.output()[-5000:]
        return read(start.output())


def test_ten_kills_change_nothing(tmp_path, record_property):
    undisturbed, place = tmp_path / "undisturbed", tmp_path / "killed"
    expected = to_the_end(undisturbed, tmp_path / "undisturbed.log")
    dues, attempts, half_written = [], [], 0
    for planned in plan():
        dues.append(newest_whole(place))
        kill = possible(planned, ITERATIONS - dues[-1])
        with Start(place, tmp_path / f"killed_{len(attempts):02d}.log") as start:
            start.kill(kill)
            assert start.wait() != 0, f"it ended well although rank {kill.rank} was killed"
            attempts.append(read(start.output()))
        half_written += bool(unfinished(place))
    dues.append(newest_whole(place))
    attempts.append(to_the_end(place, tmp_path / "last.log"))
    assert newest_whole(place) == ITERATIONS
    for due, attempt in zip(dues, attempts, strict=True):
        assert attempt.loaded == due or not attempt.losses
        assert attempt.losses.items() <= {**attempt.losses, **expected.losses}.items()
    for folder in undisturbed.glob("iter_*"):
        assert not differing(folder, place / folder.name), folder.name
    # some were in the middle of a save, and most of the run was done by processes that went on
    assert half_written >= 3
    assert len([attempt for attempt in attempts if attempt.losses and attempt.loaded]) >= 3
    iterations = sum(attempt.iterations for attempt in attempts)
    outcome = {"resumed from the last complete checkpoint with right bits": KILLS}
    record_faults("kill of a rank at a random moment", outcome, record_property)
    record_property("kills that left an unfinished checkpoint", half_written)
    record_property("iterations lost", iterations - ITERATIONS)
