"""A rank is killed while a run saves over a checkpoint; what is loaded later is complete."""

import itertools
import os
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch import distributed

from megatron_eopt.tools.explain import explain
from tests.functional.formats import FORMATS
from tests.functional.script import TINY, _run_once, losses, train
from tests.functional.slurm_cluster import wait_until
from tests.harness import RankError, run_ranks

ITERATION = "iter_0000002"
SAVE = ["--train-iters", "2", "--save-interval", "2", "--hidden-dropout", "0"]
ASYNC = "--async-save --async-strategy mcore".split()


def die_in_a_save(flags: list[str], victim: int, before: int) -> str:
    """Train; a rank is killed when it is about to write a file of the checkpoint."""
    if distributed.get_rank() == victim:
        own, left = os.getpid(), itertools.count(before, -1)

        def hook(event: str, args: tuple[object, ...]) -> None:
            place = str(args[1 if event == "os.rename" else 0]) if args else ""
            writes = event in ("os.rename", "os.mkdir") or (event == "open" and args[1] != "r")
            if writes and f"{ITERATION}/" in place and next(left) == 0:
                # the other rank writes its files meanwhile
                time.sleep(1)
                # an asynchronous save has a process of its own
                os.kill(own, signal.SIGKILL)

        sys.addaudithook(hook)
    return _run_once(flags)


def die_when_the_manager_runs(flags: list[str], noted: Path) -> str:
    """Train; the rank notes megatron-core's manager process of its first save and is killed."""

    def watch() -> None:
        while (queue := filesystem_async._results_queue) is None:
            time.sleep(0.01)
        # the manager's own threads have started by the time that it has a queue
        noted.write_text(str(queue._manager._process.pid))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    return _run_once(flags)


def runs(process: int) -> bool:
    """Return whether a process runs; one that has ended but was not waited for has no command."""
    try:
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


def save_over(folder: Path, flags: list[str], victim: int = 1, before: int = 0) -> None:
    """Let another run die while it saves to the same folder."""
    other = [*TINY, *SAVE, *flags, "--seed", "8", "--save", str(folder)]
    # the other rank may see it first
    with pytest.raises(RankError, match=r"exit code -9|Connection closed|Connection reset"):
        run_ranks(2, die_in_a_save, other, victim, before, timeout=300, cpu=False)


def resumed(folder: Path, flags: list[str], ranks: int = 2) -> list[str]:
    """Return the losses after the checkpoint in a folder."""
    more = ["--hidden-dropout", "0", "--override-opt_param-scheduler", "--train-iters", "4"]
    output = train(*flags, *more, "--load", str(folder), timeout=300, ranks=ranks)
    assert re.search(r"successfully loaded checkpoint .* at iteration 2", output)
    return losses(output)


@pytest.mark.timeout(600)
@pytest.mark.long
@pytest.mark.parametrize("form", FORMATS)
def test_the_old_content_is_loaded(tmp_path, form):
    folder, whole, flags = tmp_path / "run", tmp_path / "whole", FORMATS[form]
    train(*SAVE, *flags, "--save", str(folder), timeout=300)
    shutil.copytree(folder, whole)
    save_over(folder, flags)
    assert any((folder / ITERATION).rglob("*")), "it was killed before it wrote"
    assert explain(folder).model == explain(whole).model
    assert resumed(folder, flags) == resumed(whole, flags)
    # the next save ends this
    train(*SAVE, *flags, "--seed", "9", "--save", str(folder), timeout=300)
    assert {path.name for path in folder.iterdir()} == {path.name for path in whole.iterdir()}
    assert resumed(folder, flags) != resumed(whole, flags)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", ["torch_dist", "fsdp_dtensor"])
@pytest.mark.parametrize("victim", [0, 1])
def test_the_old_content_is_loaded_after_an_asynchronous_save(tmp_path, form, victim):
    folder, whole, flags = tmp_path / "run", tmp_path / "whole", FORMATS[form]
    for seed in ("1", "7"):
        train(*SAVE, *flags, *ASYNC, "--seed", seed, "--save", str(folder), timeout=300)
    shutil.copytree(folder, whole)
    assert {path.name for path in whole.glob("*iter_*")} == {ITERATION}
    save_over(folder, [*flags, *ASYNC], victim)
    assert resumed(folder, flags) == resumed(whole, flags)


@pytest.mark.long
def test_the_manager_of_asynchronous_saves_ends_with_a_killed_rank(tmp_path):
    flags = [*TINY, *SAVE, *FORMATS["torch_dist"], *ASYNC, "--save", str(tmp_path / "run")]
    noted = tmp_path / "process"
    try:
        # a manager that stays keeps the rank's pipes open, so that the harness waits in vain
        with pytest.raises(RankError, match="exit code -9"):
            run_ranks(1, die_when_the_manager_runs, flags, noted, timeout=40, cpu=False)
        wait_until(lambda: not runs(int(noted.read_text())), "the manager ends", 20)
    finally:
        if noted.exists() and runs(int(noted.read_text())):
            os.kill(int(noted.read_text()), signal.SIGKILL)


@pytest.mark.long
def test_a_first_save_that_was_killed_is_no_checkpoint(tmp_path):
    flags = FORMATS["torch"]
    save_over(tmp_path, flags)
    assert list(tmp_path.glob(f"*{ITERATION}/*/mp_rank_00/model_optim_rng.pt"))
    with pytest.raises(RankError, match=f"{ITERATION}': does not exist"):
        train(*flags, "--load", str(tmp_path), "--ckpt-step", "2", timeout=300)
    # the same command starts anew
    again = ["--save", str(tmp_path), "--load", str(tmp_path)]
    assert len(losses(train(*SAVE, *flags, *again, timeout=300))) == 2
    assert len(resumed(tmp_path, flags)) == 2


@pytest.mark.long
def test_files_of_more_ranks_do_not_stay(tmp_path):
    one = [*FORMATS["torch"], "--tensor-model-parallel-size", "1"]
    train(*SAVE, *FORMATS["torch"], "--save", str(tmp_path), timeout=300)
    assert len(list(tmp_path.rglob("mp_rank_*"))) == 2
    train(*SAVE, *one, "--save", str(tmp_path), ranks=1, timeout=300)
    assert len(list(tmp_path.rglob("mp_rank_*"))) == 1
    assert len(resumed(tmp_path, one, ranks=1)) == 2
