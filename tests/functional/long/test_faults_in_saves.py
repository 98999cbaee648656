"""Faults of disks and machines in a save: the run stops, and then goes on as if undisturbed.

A save is a series of operations on files, by each rank. Each of them fails, or its rank dies, in a
run of its own. The same command then starts the run again, from the last complete checkpoint.
"""

import errno
import hashlib
import itertools
import os
import re
import resource
import shutil
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from tests.functional.formats import FORMATS
from tests.functional.long.test_faults_in_steps import held
from tests.functional.saved_states import differing
from tests.functional.script import TINY, _run_once, losses
from tests.harness import run_ranks
from tests.harness.endings import errors_of
from tests.harness.long_results import record_faults

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

LIMIT_S = 300.0
"""Within this time all ranks have ended."""

BEFORE, ITERATION, TRACKER = "iter_0000002", "iter_0000004", "latest_checkpointed_iteration.txt"
ERRORS = {"no space": errno.ENOSPC, "read-only": errno.EROFS}
LONG_FILES = "no space in the middle of a file"

ASYNC = "--async-save --async-strategy mcore".split()
KINDS = {
    "torch_dist": FORMATS["torch_dist"],
    "torch_dist, asynchronous": [*FORMATS["torch_dist"], *ASYNC],
    "torch": FORMATS["torch"],
    "fsdp_dtensor": FORMATS["fsdp_dtensor"],
}


@dataclass(frozen=True)
class Place:
    """An operation on files in a save."""

    rank: int
    event: str  # Python's name of it
    path: str  # relative to the folder of the run


def command(flags: list[str], folder: Path) -> list[str]:
    saving = ["--save", str(folder), "--load", str(folder), "--save-interval", "2"]
    return [*TINY, *flags, "--train-iters", "4", *saving]


def watched(flags: list[str], folder: Path, act: Callable[[Place, Path], object]) -> str:
    """Run; call ``act`` before each operation of this rank in the save. Return the output."""
    rank, is_on = distributed.get_rank(), [True]

    def hook(event: str, args: tuple[object, ...]) -> None:
        if not is_on or event not in ("open", "os.mkdir", "os.rename", "shutil.rmtree"):
            return
        if event == "open" and not set("wax+") & set(str(args[1])):
            return
        # what is renamed may have a random name then
        path = str(args[0]).removeprefix(f"{folder}/")
        if ITERATION in path or (path == TRACKER and (folder / ITERATION).exists()):
            # so has the folder that a save writes
            known = re.sub(r"(new|old)\.[0-9a-f]{32}", r"\1", path)
            act(Place(rank, event, known), folder / path)

    sys.addaudithook(hook)
    try:
        return _run_once(command(flags, folder))
    finally:
        is_on.clear()


def places_of(flags: list[str], folder: Path) -> tuple[list[Place], str]:
    """Save undisturbed; return this rank's operations, and the output."""
    found: dict[Place, None] = {}
    printed = watched(flags, folder, lambda place, _: found.setdefault(place))
    return list(found), printed


@dataclass(frozen=True)
class Fault:
    """What happens to a rank at a place, or to the files that it begins there."""

    place: Place
    kind: str


def inflict(fault: Fault, path: Path, process: int) -> None:
    if fault.kind in ERRORS:
        if fault.place.event == "open":
            # a full disk has room for a name
            os.close(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY))
        raise OSError(ERRORS[fault.kind], os.strerror(ERRORS[fault.kind]), str(path))
    if fault.kind == LONG_FILES:
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))
        return
    # the other rank does what it can meanwhile
    time.sleep(2)
    if fault.kind == "killed":
        os.killpg(process, signal.SIGKILL)


def suffer(flags: list[str], folder: Path, fault: Fault) -> None:
    left, process = itertools.count(0, -1), os.getpid()

    def act(place: Place, path: Path) -> None:
        if place == fault.place and next(left) == 0:
            inflict(fault, path, process)

    watched(flags, folder, act)


def outcome_of(flags: list[str], folder: Path, fault: Fault) -> str:
    """Let a run suffer; return how it ended."""
    errors = errors_of(suffer, flags, folder, fault, limit_s=LIMIT_S, cpu=False)
    if errors is None:
        return "went on with right bits"
    assert errors.keys() | {fault.place.rank} == {0, 1}, (fault, errors)
    if fault.kind in ERRORS:
        # of an error in a worker, megatron-core raises the kind and logs the text
        told = (os.strerror(ERRORS[fault.kind]), "OSError")
        assert any(text in error for text in told for error in errors.values()), (fault, errors)
    return "stopped on all ranks, the last complete checkpoint loads"


def loaded_from(flags: list[str], folders: list[Path]) -> list[str]:
    """Load from folders in one process; return hashes of all weights and state."""
    from megatron.training import checkpointing, training

    hashes = []

    def load(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        run = checkpointing.get_args()
        for run.load in map(str, folders):
            done = checkpointing.load_checkpoint(model, optimizer, *args, **kwargs)
            digest = hashlib.blake2b(repr(done[0]).encode())
            for tensor in held(optimizer):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                digest.update(local.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
            hashes.append(digest.hexdigest())
        return done

    with mock.patch.object(training, "load_checkpoint", load):
        _run_once(command(flags, folders[-1]))
    return hashes


def faults_at(places: list[Place]) -> list[Fault]:
    """Return a fault of each place, and those that only some have."""
    kinds = itertools.cycle(["no space", "killed", "killed", "no space"])
    found = [Fault(place, kind) for place, kind in zip(places, kinds, strict=False)]
    files = [place for place in places if place.event == "open" and place.path.endswith(".distcp")]
    found += [Fault(place, kind) for place in files for kind in (LONG_FILES, "stalls")]
    made = [place for place in places if place.event == "os.mkdir"]
    return found + [Fault(place, "read-only") for place in made]


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_complete_checkpoint_is_loaded(tmp_path, kind, record_property):
    flags, undisturbed, start = KINDS[kind], tmp_path / "undisturbed", tmp_path / "start"
    undisturbed.mkdir()
    found = run_ranks(2, places_of, flags, undisturbed, cpu=False, timeout=LIMIT_S)
    faults = faults_at([place for places, _ in found for place in places])
    expected = losses("".join(printed for _, printed in found))
    shutil.copytree(undisturbed, start)
    shutil.rmtree(start / ITERATION)
    (start / TRACKER).write_text("2")
    folders = [tmp_path / f"run{number}" for number in range(len(faults))]
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    for fault, folder in zip(faults, folders, strict=True):
        shutil.copytree(start, folder)
        outcomes[fault.kind][outcome_of(flags, folder, fault)] += 1
    # the state after the save, or before
    at = [(folder / TRACKER).read_text() for folder in folders]
    clock_set_back = tmp_path / "clock set back"
    shutil.copytree(undisturbed, clock_set_back)
    for path in (clock_set_back / ITERATION).rglob("*"):
        os.utime(path, (0, 0))
    everything = [start, undisturbed, clock_set_back, *folders, start]
    for hashes in run_ranks(2, loaded_from, flags, everything, cpu=False, timeout=3 * LIMIT_S):
        before, after, clock, *loaded, _ = hashes
        assert clock == after != before
        assert loaded == [before if iteration == "2" else after for iteration in at]
    outcomes["the clock is set back before it"]["went on with right bits"] += 1
    # a run goes on over what an unfinished save has left
    last = next(folder for folder, it in zip(folders[::-1], at[::-1], strict=True) if it == "2")
    outputs = run_ranks(2, _run_once, command(flags, last), cpu=False, timeout=LIMIT_S)
    resumed = losses("".join(outputs))
    # the trainer's second report after a resume is the mean of two losses
    assert (len(resumed), resumed[0]) == (2, expected[2])
    if kind != "torch":
        # with Megatron-FSDP, the saved state of torch's generator is not that of the whole run
        differ = differing(undisturbed / ITERATION, last / ITERATION)
        assert not [k for k in differ if (kind, k.split(".")[0]) != ("fsdp_dtensor", "rng_state")]
    for what, counts in outcomes.items():
        record_faults(f"save, {kind}: {what}", counts, record_property)
