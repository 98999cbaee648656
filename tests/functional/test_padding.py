"""The loss does not notice that a run goes on at another tensor parallelism."""

import pytest

from tests.functional.script import losses, train

FLAGS = "--optimizer muon --use-distributed-optimizer --vocab-size 257".split()
FLAGS += "--hidden-dropout 0 --attention-dropout 0".split()


def test_another_tensor_parallelism_keeps_the_padding_and_the_loss(tmp_path):
    saving = ["--save", str(tmp_path), "--save-interval", "3"]
    whole = train(*FLAGS, *saving)
    moved = train(
        *FLAGS, "--load", str(tmp_path), "--ckpt-step", "3", "--tensor-model-parallel-size", "2"
    )
    first, _, last = (float(loss) for loss in losses(moved))  # the second is printed as a mean
    expected = [float(loss) for loss in losses(whole)]
    assert (first, last) == pytest.approx((expected[3], expected[5]), abs=1e-3)
