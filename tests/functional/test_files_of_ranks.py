"""Checkpoints of format ``torch``, of which each rank reads files of its own."""

from pathlib import Path

import pytest

from tests.functional.runner import PLAIN
from tests.functional.script import TINY, losses, train

EXPERTS = (
    "--num-experts 4 --expert-model-parallel-size 2 --moe-router-load-balancing-type none "
    "--moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 64"
)
FORMATS = ("--ckpt-format torch", "--ckpt-format torch_dist")


def goes_on(optimizer: str, folder: Path, saving: str, *loading: str) -> None:
    """Train in one go, saving midway, and go on from there with each of some flags."""
    flags = [*PLAIN[len(TINY) :], "--use-distributed-optimizer", *optimizer.split()]
    kept = ["--save", str(folder), "--save-interval", "3", *saving.split()]
    whole = losses(train(*flags, *kept, timeout=300))
    for further in loading:
        found = ["--load", str(folder), "--ckpt-step", "3", *further.split()]
        rest = losses(train(*flags, *found, timeout=300))
        # a process prints its second loss as part of a mean
        assert len(rest) == 3
        assert [rest[0], rest[2]] == [whole[3], whole[5]], further


@pytest.mark.parametrize(
    "optimizer",
    [
        "muon",
        pytest.param("muon --bf16", marks=pytest.mark.long),
        pytest.param("soap", marks=pytest.mark.long),
        pytest.param("adam", marks=pytest.mark.long),
        pytest.param("adam --bf16", marks=pytest.mark.long),
        pytest.param("sgd", marks=pytest.mark.long),
        pytest.param("sgd --sgd-momentum 0", marks=pytest.mark.long),
        pytest.param(f"adam {EXPERTS}", marks=pytest.mark.long),
    ],
)
def test_files_of_ranks_resume_a_run(tmp_path, optimizer):
    # the folder says how it was written, whatever the run is going to write
    goes_on(f"--optimizer {optimizer}", tmp_path, "--ckpt-format torch", *FORMATS)


@pytest.mark.long
def test_a_run_that_writes_files_of_ranks_resumes_from_a_distributed_checkpoint(tmp_path):
    loading = "--ckpt-format torch --auto-detect-ckpt-format"
    goes_on("--optimizer muon", tmp_path, "--ckpt-format torch_dist", loading)
