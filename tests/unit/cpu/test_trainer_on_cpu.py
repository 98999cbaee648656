"""Megatron's trainer: training, evaluation, a checkpoint, and a second trainer that resumes."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest

from megatron_eopt.cpu import check_supported
from tests.harness import run_ranks
from tests.harness.scene import forget_megatron

SCRIPT = Path(__file__).parents[3] / "scripts" / "pretrain_gpt.py"

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-2 "
    "--max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 4 --lr-decay-iters 100 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 63 --split 90,5,5 --num-workers 1 "
    "--transformer-impl local --distributed-backend gloo --attention-backend unfused "
    "--no-rope-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion --optimizer adam "
    "--disable-bias-linear --eval-iters 1 --eval-interval 2 --ckpt-format torch_dist --seed 7 "
    "--log-interval 1 --train-iters 4 --hidden-dropout 0.1 --attention-dropout 0.1"
)


def _train(*flags: str) -> list[float]:
    """Run one stock trainer; return the losses that it prints (the last rank prints them)."""
    forget_megatron()
    sys.argv = [str(SCRIPT), *FLAGS.split(), *flags]
    script = runpy.run_path(str(SCRIPT), run_name="pretrain_gpt")
    output = io.StringIO()
    # the trainer ends the process when it stops early
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        args = script["parse_and_validate_args"]()
        check_supported(args)
        model = script["gpt_config_from_args"](args)
        script["pretrain"](
            script["pretrain_cfg_container_from_args"](args, model_cfg=model),
            script["datasets_provider"],
            script["ModelType"].encoder_or_decoder,
            script["forward_step"],
        )
    return [float(loss) for loss in re.findall(r"\| lm loss: (\S+)", output.getvalue())]


def _train_and_resume(folder: Path) -> tuple[list[float], list[float], list[float]]:
    whole = _train()
    half = _train("--save", str(folder), "--save-interval", "2", "--exit-interval", "2")
    resumed = _train("--load", str(folder))
    return whole, half, resumed


@pytest.mark.long
def test_three_trainers_in_sequence(tmp_path: Path) -> None:
    whole, half, resumed = run_ranks(2, _train_and_resume, tmp_path, timeout=240)[-1]
    assert len(whole) == 4
    assert half == whole[:2]
    # the weights, the place in the data and the state of the GPU's generator are the checkpoint's
    assert len(resumed) == 2
    assert resumed[0] == whole[2]


def test_single_process() -> None:
    (losses,) = run_ranks(1, _train, "--bf16", "--use-distributed-optimizer", timeout=120)
    assert len(losses) == 4
