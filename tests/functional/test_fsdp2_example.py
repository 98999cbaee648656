"""The example without Megatron, and the two files of its optimizer.

The long tier starts it as its document says.
"""

import contextlib
import io
import os
import re
import runpy
import socket
import sys

import torch.distributed as dist

from tests.functional.script import ROOT
from tests.harness import run_ranks

EXAMPLES = ROOT / "examples"
SMALL = ["--steps", "20", "--layers", "1", "--hidden", "48", "--heads", "4", "--seq-length", "32"]


def _run(port: int) -> str:
    """Run the example as torchrun's processes do."""
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    script, config = EXAMPLES / "fsdp2_pretrain.py", EXAMPLES / "muon_on_fsdp2.yaml"
    sys.argv = [str(script), "--config", str(config), "--tokens", "20000", *SMALL]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


def test_the_loss_falls():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    losses = [
        float(loss)
        for output in run_ranks(2, _run, port, timeout=120, cpu=False)
        for loss in re.findall(r"loss (\S+)", output)
    ]
    assert len(losses) == 20
    # ln 257 at the start
    assert 5.4 < losses[0] < 5.7
    assert losses[-1] < losses[0] - 1


def test_the_example_imports_no_megatron():
    assert not re.search(
        r"(?m)^(from|import) megatron[. ]", (EXAMPLES / "fsdp2_pretrain.py").read_text()
    )
