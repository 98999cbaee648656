"""The example without Megatron, and the two files of its optimizer.

The long tier starts it as its document says.
"""

import argparse
import contextlib
import io
import re
import runpy
import sysconfig
from pathlib import Path

import torch

from tests.functional.script import ROOT
from tests.harness import run_ranks

EXAMPLE = ROOT / "examples" / "fsdp2_pretrain.py"
SMALL = {"steps": 20, "layers": 1, "hidden": 48, "heads": 4, "seq_length": 32, "batch_size": 8}
TEXT = {"text": Path(sysconfig.get_paths()["stdlib"]), "suffix": ".py", "tokens": 20000}


def _run() -> str:
    config = ROOT / "examples" / "muon_on_fsdp2.yaml"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        args = argparse.Namespace(config=config, **SMALL, **TEXT)
        runpy.run_path(str(EXAMPLE))["train"](args, torch.device("cpu"))
    return printed.getvalue()


def test_the_loss_falls():
    outputs = run_ranks(2, _run, timeout=120, cpu=False)
    losses = [float(loss) for output in outputs for loss in re.findall(r"loss (\S+)", output)]
    assert len(losses) == 20
    # ln 257 at the start
    assert 5.4 < losses[0] < 5.7
    assert losses[-1] < losses[0] - 1


def test_the_example_imports_no_megatron():
    assert not re.search(r"(?m)^(from|import) megatron[. ]", EXAMPLE.read_text())
