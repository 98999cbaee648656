"""The example without Megatron, started as a user does, and the two files of its optimizer."""

import dataclasses
import os
import re
import subprocess
import sys

from megatron_eopt import load_optimizer_config
from tests.functional.script import ROOT

EXAMPLES = ROOT / "examples"
SMALL = ["--steps", "20", "--layers", "1", "--hidden", "48", "--heads", "4", "--seq-length", "32"]


def test_the_loss_falls():
    script, config = EXAMPLES / "fsdp2_pretrain.py", EXAMPLES / "muon_on_fsdp2.yaml"
    result = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(script)),
            *("--config", str(config), "--tokens", "20000", *SMALL),
        ],
        env={**os.environ, "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", result.stdout)]
    assert len(losses) == 20
    # ln 257 at the start
    assert 5.4 < losses[0] < 5.7
    assert losses[-1] < losses[0] - 1


def test_the_example_imports_no_megatron():
    assert not re.search(
        r"(?m)^(from|import) megatron[. ]", (EXAMPLES / "fsdp2_pretrain.py").read_text()
    )


def test_the_files_of_the_two_back_ends_differ_in_the_back_end_alone():
    ours, theirs = (
        dataclasses.asdict(load_optimizer_config(EXAMPLES / f"muon_on_{name}.yaml"))
        for name in ("fsdp2", "megatron")
    )
    differing = {key for key in ours if ours[key] != theirs[key]}
    assert differing == {"use_distributed_optimizer"}
