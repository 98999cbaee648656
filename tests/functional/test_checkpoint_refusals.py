"""The trainer and checkpoints that are damaged, unfinished or of another run."""

import hashlib
import re
from pathlib import Path

import pytest

from tests.functional.script import TINY, _run_once, losses, train
from tests.harness import run_ranks

# the schedule of a longer run is another one
SHARDED = ["--use-distributed-optimizer", "--override-opt-param-scheduler"]
MUON = ["--optimizer", "muon", *SHARDED]
ADAM = ["--optimizer", "adam", *SHARDED]
TORCH = ["--ckpt-format", "torch", "--override-opt-param-scheduler"]
TRACKER = "latest_checkpointed_iteration.txt"
TIMEOUT = 240.0


def _error_of(flags: list[str]) -> str:
    """Run the script; return what it raises, or "" and what it prints."""
    try:
        _run_once(flags)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused(folder: Path, *flags: str) -> str:
    """Let two ranks fail to load ``folder``; return the error, which both must raise alike."""
    before = contents(folder)
    arguments = [*TINY, "--train-iters", "3", *flags, "--load", str(folder)]
    errors = run_ranks(2, _error_of, arguments, cpu=False, timeout=TIMEOUT)
    assert errors[0] == errors[1]
    assert errors[0], "it was loaded"
    assert contents(folder) == before
    return errors[0]


def loaded(folder: Path, *flags: str) -> tuple[int, str]:
    """Train one further iteration; return which one was loaded, and what was printed."""
    output = train("--train-iters", "3", *flags, "--load", str(folder), timeout=TIMEOUT)
    found = re.search(r"successfully loaded checkpoint .* at iteration (\d+)", output)
    assert found, output
    assert losses(output)
    return int(found[1]), output


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def save(folder: Path, *flags: str) -> str:
    saving = ["--save", str(folder), "--save-interval", "1"]
    output = train("--train-iters", "2", *flags, *saving, timeout=TIMEOUT)
    assert (folder / TRACKER).read_text() == "2"
    return output


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Checkpoints of iterations 1 and 2."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder, *MUON)
    return folder


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--hidden-size", "32"], "was written by another model; tensors of another shape"),
        (["--qk-layernorm"], "lacks tensors that this run asks for: .*layernorm"),
    ],
    ids=["hidden size", "more tensors"],
)
def test_another_model_is_refused(saved, flags, words):
    assert re.search(words, refused(saved, *MUON, *flags))


def test_another_schedule_is_refused(saved):
    flags = [flag for flag in MUON if flag != "--override-opt-param-scheduler"]
    error = refused(saved, *flags)
    assert error.startswith("CheckpointError")
    assert "--override-opt-param-scheduler" in error


@pytest.mark.long
def test_files_of_another_optimizer_are_refused(tmp_path):
    save(tmp_path, "--optimizer", "adam", *SHARDED, *TORCH)
    flags = [*MUON, "--ckpt-format", "torch"]
    assert "mp_rank_00/layer_wise_optimizer_0.pt cannot be read" in (
        error := refused(tmp_path, *flags)
    )
    assert "--no-load-optim" in error
    assert loaded(tmp_path, *flags, "--no-load-optim")[0] == 2


@pytest.mark.long
@pytest.mark.parametrize("present", [MUON, ADAM], ids=["muon", "adam"])
def test_buckets_of_another_layout_are_refused(tmp_path, present):
    save(tmp_path, *ADAM)
    error = refused(tmp_path, *present, "--tensor-model-parallel-size", "2")
    assert re.search("dp_reshardable|dp_zero|buckets", error)
