"""Runs scripts inside worker processes that have imported Megatron already, to save that time."""

import contextlib
import functools
import io
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
from megatron.training.argument_utils import ArgumentGroupFactory

from megatron_eopt import cpu, megatron_lm
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.harness.programs import ROOT

SCRIPT = ROOT / "scripts" / "pretrain_gpt.py"
STOCK_SCRIPT = ROOT / "tests" / "functional" / "upstream_style_gpt.py"

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
# what the launcher does by itself on a CPU
STOCK_ON_CPU = """
    --distributed-backend gloo --transformer-impl local --no-masked-softmax-fusion
    --no-bias-swiglu-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --no-gradient-accumulation-fusion --no-persist-layer-norm --use-cpu-initialization
""".split()


@functools.cache
def read_settings_once() -> None:
    """Let the trainer read the source of its settings once, not for every run in this process."""
    reader: Any = object.__new__(ArgumentGroupFactory)
    read = functools.cache(reader._get_field_docstrings)
    ArgumentGroupFactory._get_field_docstrings = lambda _, settings: dict(read(settings))


def run_here(run: Callable[..., object], *args: object) -> str:
    """Run something that takes this process over, and put the process back; return its output."""
    os.environ["MEGATRON_EOPT_DEVICE"] = "cpu"
    read_settings_once()
    argv, path, main = sys.argv[:], sys.path[:], sys.modules["__main__"]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            run(*args)
    except SystemExit as ended:
        # the trainer ends the process when it stops early
        if ended.code:
            raise
    finally:
        megatron_lm.uninstall()
        sys.argv[:], sys.path[:], sys.modules["__main__"] = argv, path, main
        forget_megatron()
    return printed.getvalue()


def run_script(script: Path, flags: list[str]) -> None:
    """Run a script as Python does, in this process."""
    sys.argv[:] = [str(script), *flags]
    runpy.run_path(str(script), run_name="__main__")


def run_stock(flags: list[str]) -> None:
    """Run a script that knows nothing of us as it is."""
    cpu.enable_if_chosen()
    run_script(STOCK_SCRIPT, [*flags, *STOCK_ON_CPU])


def _run_once(flags: list[str]) -> str:
    # it would shuffle millions of samples
    with mock.patch.object(MockGPTLowLevelDataset, "size", 1000):
        return run_here(run_script, SCRIPT, flags)


def train(*flags: str, ranks: int = 2, timeout: float = 120) -> str:
    """Train at the tiny size with further flags; return what all ranks printed."""
    return "".join(run_ranks(ranks, _run_once, [*TINY, *flags], timeout=timeout, cpu=False))


def save(folder: Path, *flags: str, interval: int = 2, ranks: int = 2) -> None:
    """Train two steps and save."""
    saving = ["--save", str(folder), "--save-interval", str(interval)]
    train("--train-iters", "2", *flags, *saving, ranks=ranks, timeout=300)


def losses(output: str) -> list[str]:
    """Return the training losses as printed."""
    return re.findall(r"lm loss: (\S+)", output)


def numbers(output: str) -> list[float]:
    """Return the training losses."""
    return [float(loss) for loss in losses(output)]
