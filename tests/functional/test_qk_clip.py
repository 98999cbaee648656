"""A training whose attention logits grow, with the trainer's flags and on two CPU processes."""

from pathlib import Path

import pytest

from tests.functional.saved_states import differing
from tests.functional.script import train
from tests.functional.test_optimizer_stats import scalars

THRESHOLD = 4.0
# logits grow by a few percent a step, and differ as little between batches of this size
GROWING = """
    --optimizer muon --muon-scale-mode spectral --lr 1.5e-3 --lr-decay-style constant
    --weight-decay 0 --train-iters 80
    --init-method-std 0.08 --micro-batch-size 32 --global-batch-size 128
    --hidden-dropout 0 --attention-dropout 0 --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --log-max-attention-logit --save-interval 60
    --tensorboard-log-interval 1 --group-query-attention --num-query-groups 2
""".split()
CLIPPED = [*GROWING, "--qk-clip", "--qk-clip-threshold", str(THRESHOLD), "--qk-clip-alpha", "0.5"]
CLIPPED += ["--tensor-model-parallel-size", "2", "--sequence-parallel"]


def logged(folder):
    return list(scalars(folder)["max_attention_logit"].values())


@pytest.mark.long
@pytest.mark.timeout(900)
def test_logits_stay_below_the_threshold_and_a_resumed_run_is_the_same(tmp_path):
    places = {name: str(tmp_path / name) for name in ("free", "clipped", "first", "second")}
    train(*GROWING, "--tensorboard-dir", places["free"], timeout=300)
    first = ["--save", places["first"], "--tensorboard-dir", places["clipped"]]
    train(*CLIPPED, *first, timeout=300)
    free, clipped = logged(places["free"]), logged(places["clipped"])
    assert max(free) > 1.2 * THRESHOLD
    assert max(clipped) < 1.1 * THRESHOLD
    train(*CLIPPED, "--load", places["first"], "--ckpt-step", "60", "--save", places["second"])
    assert not differing(*(Path(places[name], "iter_0000080") for name in ("first", "second")))
