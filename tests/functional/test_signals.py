"""How training ends before its time: by SIGTERM, or because the loss is not a number."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.functional.script import ROOT, SCRIPT, TINY, losses, train
from tests.functional.slurm_cluster import free_ports
from tests.harness import RankError

# many steps, so that the signal falls into training
LONG = "--optimizer muon --use-distributed-optimizer --train-iters 2000".split()
LONG += "--lr-decay-iters 2000 --hidden-dropout 0.1 --attention-dropout 0.1".split()
LONG += "--ckpt-format torch_dist --exit-signal-handler".split()


# as tests.functional.script has them
FEW_SAMPLES = """import megatron.core.datasets.gpt_dataset as mock_data
mock_data.MockGPTLowLevelDataset.size = 1000"""


def start_ranks(flags: list[str]) -> list[subprocess.Popen[str]]:
    """Start two ranks as a launcher does."""
    (port,) = free_ports(1)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
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


@pytest.mark.long
def test_one_rank_gets_sigterm_and_all_save_what_a_second_run_goes_on_from(tmp_path):
    folder, hook = tmp_path / "checkpoints", tmp_path / "few.py"
    hook.write_text(FEW_SAMPLES)
    saving = ["--save", str(folder), "--save-interval", "2000", "--import", str(hook)]
    ranks = start_ranks([*TINY, *LONG, *saving])
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
    undisturbed = losses(train(*end, timeout=240))
    resumed = losses(train(*end, "--load", str(folder)))
    assert losses(output) == undisturbed[:saved]
    assert len(resumed) == 3
    # the trainer's second report after a resume is the mean of two losses
    assert resumed[::2] == undisturbed[saved:][::2]


def test_without_the_trainers_check_the_optimizer_refuses_on_every_rank():
    # one step leaves weights whose products do not fit into float32
    flags = "--optimizer muon --lr 1e30 --clip-grad 0 --no-check-for-nan-in-loss-and-grad".split()
    with pytest.raises(RankError) as raised:
        train(*flags, "--tensor-model-parallel-size", "2")
    found = re.findall(r"NonFiniteError: (.*)", str(raised.value))
    assert len(found) == 2
    assert found[0] == found[1]
    assert "non-finite gradients of" in found[0]
    assert "decoder.layers.0" in found[0]
