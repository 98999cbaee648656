"""The loss does not notice that a run goes on at another tensor parallelism."""

import pytest

from tests.functional.script import numbers, train
from tests.harness.tiers import mostly_long

FLAGS = "--use-distributed-optimizer --vocab-size 257".split()
FLAGS += "--hidden-dropout 0 --attention-dropout 0".split()


@pytest.mark.parametrize("optimizer", mostly_long(["muon", "adam"], "muon"))
def test_the_padding_and_the_state_go_along(tmp_path, optimizer):
    flags = [*FLAGS, "--optimizer", optimizer]
    expected = numbers(train(*flags, "--save", str(tmp_path), "--save-interval", "3"))
    resume = ["--load", str(tmp_path), "--ckpt-step", "3", "--tensor-model-parallel-size", "2"]
    # the second loss is printed as a mean
    first, _, last = numbers(train(*flags, *resume))
    assert (first, last) == pytest.approx((expected[3], expected[5]), abs=1e-3)
