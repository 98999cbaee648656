"""Runs the training script inside worker processes that have imported Megatron already.

What torchrun does besides starting processes is tested by a few real starts; everything else saves
the ten seconds of imports that each of them costs.
"""

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path

from tests.harness import run_ranks
from tests.harness.scene import forget_megatron

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "pretrain_gpt.py"

TINY = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 6
    --lr 1e-2 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --split 90,5,5
    --num-workers 0 --attention-backend unfused --disable-bias-linear --log-interval 1
    --eval-interval 1000 --eval-iters 1 --seed 7
""".split()
EXPERTS = """
    --num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall
    --moe-router-topk 2 --moe-router-load-balancing-type none
""".split()


def _run_once(flags: list[str]) -> str:
    os.environ["MEGATRON_EOPT_DEVICE"] = "cpu"
    printed = io.StringIO()
    arguments, sys.argv = sys.argv, [str(SCRIPT), *flags]
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(SCRIPT), run_name="__main__")
    except SystemExit as ended:
        # the trainer ends the process when it stops early
        if ended.code:
            raise
    finally:
        sys.argv = arguments
        forget_megatron()
    return printed.getvalue()


def train(*flags: str, ranks: int = 2, timeout: float = 120) -> str:
    """Train at the tiny size with further flags; return what all ranks printed."""
    outputs = run_ranks(ranks, _run_once, [*TINY, *flags], timeout=timeout, cpu=False)
    return "".join(outputs)


def losses(output: str) -> list[str]:
    """Return the training losses as printed."""
    return re.findall(r"lm loss: (\S+)", output)
