"""Checkpoints of format ``torch``, of which each rank reads files of its own."""

from pathlib import Path

import pytest
import torch

from tests.functional.runner import PLAIN
from tests.functional.script import TINY, losses, train
from tests.functional.test_upstream_defects import BF16
from tests.harness import run_ranks
from tests.harness.scene import forget_megatron
from tests.unit.stores.full_state import Case, build, differences, full_state, steps, unwrapped


def one_name(case: Case, name: str) -> tuple[list[str], list[str]]:
    """Save to one file name and load it; return the files, and what differs after loading."""
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 2)
    optimizer.save_state_dict_to_file(name)
    torch.distributed.barrier()
    saved = full_state(case, chunk, optimizer)
    model = {
        key: value.clone()
        for key, value in unwrapped(chunk).state_dict().items()
        if value is not None
    }
    files = sorted(path.name for path in Path(name).parent.iterdir())
    forget_megatron()
    chunk, optimizer = build(case)
    unwrapped(chunk).load_state_dict(model, strict=False)
    optimizer.load_state_dict_from_file(name)
    return files, differences(saved, full_state(case, chunk, optimizer))


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_ranks_that_are_given_one_file_name_keep_their_own_files(tmp_path, name):
    for files, different in run_ranks(2, one_name, Case(name, BF16), str(tmp_path / "state.pt")):
        assert files == ["state_rank00000.pt", "state_rank00001.pt"]
        assert not different


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
        "adam --bf16",
        pytest.param("sgd", marks=pytest.mark.long),
        pytest.param("sgd --sgd-momentum 0", marks=pytest.mark.long),
        pytest.param(f"adam {EXPERTS}", marks=pytest.mark.long),
    ],
)
def test_files_of_ranks_resume_a_run(tmp_path, optimizer):
    # the folder says how it was written, whatever the run is going to write
    goes_on(f"--optimizer {optimizer}", tmp_path, "--ckpt-format torch", *FORMATS)


def test_a_run_that_writes_files_of_ranks_resumes_from_a_distributed_checkpoint(tmp_path):
    loading = "--ckpt-format torch --auto-detect-ckpt-format"
    goes_on("--optimizer muon", tmp_path, "--ckpt-format torch_dist", loading)
