"""The training script at tiny sizes on two CPU processes."""

import re

import pytest

from tests.functional.script import losses, train


@pytest.mark.long
@pytest.mark.parametrize("storage", [[], ["--use-distributed-optimizer"]], ids=len)
def test_a_run_asks_for_the_rates_of_the_checkpoint(tmp_path, storage):
    flags = ["--optimizer", "muon", *storage, "--lr-decay-iters", "20", "--min-lr", "1e-4"]
    flags += ["--hidden-dropout", "0", "--attention-dropout", "0"]
    first = train(*flags, "--save", str(tmp_path), "--save-interval", "3")
    resume = ["--load", str(tmp_path), "--ckpt-step", "3", "--lr", "0.05", "--min-lr", "0.02"]
    again = train(*flags, *resume, "--use-checkpoint-opt_param-scheduler")
    own = train(*flags, *resume, "--override-opt_param-scheduler")
    assert rates(again) == rates(first)[3:]
    assert losses(again)[-1] == losses(first)[-1]
    assert min(rates(own)) > 0.02


def rates(output):
    return [float(rate) for rate in re.findall(r"learning rate: (\S+)", output)]
