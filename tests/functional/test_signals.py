"""How training ends before its time: by SIGTERM, or because the loss is not a number."""

import contextlib
import io
import os
import re
import runpy
import signal
import socket
import subprocess
import sys

import pytest

from tests.functional.script import ROOT, SCRIPT, TINY, losses, train
from tests.harness import RankError, run_ranks
from tests.harness.scene import forget_megatron

# many steps, so that the signal falls into training
LONG = [*TINY, *"--optimizer muon --use-distributed-optimizer --train-iters 2000".split()]
LONG += "--lr-decay-iters 2000 --hidden-dropout 0.1 --attention-dropout 0.1".split()
LONG += "--ckpt-format torch_dist --exit-signal-handler".split()


def start_ranks(flags: list[str]) -> list[subprocess.Popen[str]]:
    """Start two ranks as a launcher does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"MEGATRON_EOPT_DEVICE": "cpu", "PYTHONWARNINGS": "ignore"}
    common |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *flags],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            # read from the last one alone, which prints the losses
            stdout=subprocess.PIPE if rank == 1 else subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        for rank in range(2)
    ]


def until_exit(flags: list[str]) -> str:
    """Run the script in this process; the trainer ends it when it stops early."""
    os.environ["MEGATRON_EOPT_DEVICE"] = "cpu"
    printed = io.StringIO()
    arguments, sys.argv = sys.argv, [str(SCRIPT), *flags]
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        sys.argv = arguments
        forget_megatron()
    return printed.getvalue()


@pytest.mark.long
def test_one_rank_gets_sigterm_and_all_save_what_a_second_run_goes_on_from(tmp_path):
    folder = tmp_path / "checkpoints"
    ranks = start_ranks([*LONG, "--save", str(folder), "--save-interval", "2000"])
    output = ""
    try:
        # the last rank prints, the first one is told
        assert ranks[1].stdout is not None
        for line in ranks[1].stdout:
            output += line
            if re.search(r"iteration +3/", line):
                ranks[0].send_signal(signal.SIGTERM)
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0], output[-3000:]
    finally:
        for rank in ranks:
            rank.kill()
    saved = int((folder / "latest_checkpointed_iteration.txt").read_text())
    assert len(losses(output)) == saved >= 3

    end = [*LONG, "--exit-interval", str(saved + 3)]
    undisturbed = losses("".join(run_ranks(2, until_exit, end, cpu=False, timeout=240)))
    going_on = [*end, "--load", str(folder)]
    resumed = losses("".join(run_ranks(2, until_exit, going_on, cpu=False, timeout=120)))
    assert losses(output) == undisturbed[:saved]
    assert len(resumed) == 3
    # the trainer's second report after a resume is the mean of two losses
    assert resumed[::2] == undisturbed[saved:][::2]


# one step leaves weights whose products do not fit into float32
DIVERGING = "--optimizer muon --lr 1e30 --clip-grad 0".split()


def test_a_loss_that_is_not_a_number_is_an_error_that_names_the_iteration():
    with pytest.raises(
        RankError, match=r"iteration \d: Unexpected result nan.*the loss of a micro"
    ):
        train(*DIVERGING, "--rerun-mode", "disabled")


@pytest.mark.long
def test_by_default_the_trainer_computes_it_again_and_all_ranks_save_and_exit(tmp_path):
    saving = f"--save {tmp_path} --save-interval 2000 --ckpt-format torch_dist".split()
    with pytest.raises(RankError) as raised:
        train(*DIVERGING, *saving)
    text = str(raised.value)
    # megatron-core's exit code for an iteration that has to be looked at on another machine
    assert text.count("SystemExit: 16") == 2, text[-2000:]


def test_without_the_trainers_check_the_optimizer_refuses_on_every_rank():
    flags = ["--no-check-for-nan-in-loss-and-grad", "--tensor-model-parallel-size", "2"]
    with pytest.raises(RankError) as raised:
        train(*DIVERGING, *flags)
    found = re.findall(r"NonFiniteError: (.*)", str(raised.value))
    assert len(found) == 2
    assert found[0] == found[1]
    assert "non-finite gradients of" in found[0]
    assert "decoder.layers.0" in found[0]
