"""Megatron's trainer: training, evaluation, a checkpoint, and a second trainer that resumes."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

from tests.harness import run_ranks
from tests.harness.scene import forget_megatron

SCRIPT = Path(__file__).parents[3] / "scripts" / "pretrain_gpt.py"

FLAGS = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2
    --lr-decay-iters 100 --mock-data --tokenizer-type NullTokenizer --vocab-size 63
    --split 90,5,5 --num-workers 1 --transformer-impl local --distributed-backend gloo
    --attention-backend unfused --no-rope-fusion --no-persist-layer-norm
    --no-gradient-accumulation-fusion --disable-bias-linear --log-interval 1 --eval-iters 1
    --eval-interval 2 --ckpt-format torch_dist --seed 7 --optimizer adam
    --train-iters 4
""".split()


def _train(*flags: str) -> list[float]:
    """Run one trainer; return the losses that it prints (the last rank prints them)."""
    forget_megatron()
    sys.argv = [str(SCRIPT), *FLAGS, *flags]
    main = runpy.run_path(str(SCRIPT), run_name="pretrain_gpt")["main"]
    output = io.StringIO()
    # the trainer ends the process when it stops early
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        main()
    return [float(loss) for loss in re.findall(r"\| lm loss: (\S+)", output.getvalue())]


def _train_and_resume(folder: Path) -> tuple[list[float], list[float], list[float]]:
    whole = _train()
    half = _train("--save", str(folder), "--save-interval", "2", "--exit-interval", "2")
    resumed = _train("--load", str(folder))
    return whole, half, resumed


def test_three_trainers_in_sequence(tmp_path: Path) -> None:
    whole, half, resumed = run_ranks(2, _train_and_resume, tmp_path, timeout=240)[-1]
    assert len(whole) == 4
    assert half == whole[:2]
    # bit-equal state; the log shows seven digits of the loss
    assert resumed == whole[2:]


def test_single_process() -> None:
    (losses,) = run_ranks(1, _train, "--bf16", "--use-distributed-optimizer", timeout=120)
    assert len(losses) == 4
