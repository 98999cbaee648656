"""The training script at tiny sizes on two CPU processes."""

import re

import pytest

from megatron_eopt.testing.pool import RankError
from tests.functional.script import losses, numbers, train


@pytest.mark.long
@pytest.mark.parametrize("storage", [[], ["--use-distributed-optimizer"]], ids=len)
def test_a_run_asks_for_the_rates_of_the_checkpoint(tmp_path, storage):
    flags = ["--optimizer", "muon", *storage, "--lr-decay-iters", "20", "--min-lr", "1e-4"]
    flags += ["--hidden-dropout", "0", "--attention-dropout", "0"]
    first = train(*flags, "--save", str(tmp_path), "--save-interval", "3")
    resume = ["--load", str(tmp_path), "--ckpt-step", "3", "--lr", "0.05", "--min-lr", "0.02"]
    again = train(*flags, *resume, "--use-checkpoint-opt_param-scheduler")
    with pytest.raises(RankError, match="Pass --override-opt-param-scheduler"):
        train(*flags, *resume)
    assert rates(again) == rates(first)[3:]
    assert losses(again)[-1] == losses(first)[-1]
    assert min(rates(train(*flags, *resume, "--override-opt_param-scheduler"))) > 0.02


def rates(output):
    return [float(rate) for rate in re.findall(r"learning rate: (\S+)", output)]


@pytest.mark.long
@pytest.mark.parametrize("storage", [["--bf16"], ["--bf16", "--use-distributed-optimizer"], []])
def test_rows_are_cut_as_in_the_run_that_is_continued(tmp_path, storage):
    """Weight rematerialization over two ranks, in all runs."""
    flags = ["--optimizer", "muon", *storage, "--untie-embeddings-and-output-weights"]
    flags += ["--hidden-dropout", "0", "--attention-dropout", "0", "--swiglu"]
    files = ["--save", str(tmp_path), "--load", str(tmp_path)]
    files += ["--save-interval", "2", "--exit-interval", "2"]
    expected = numbers(train(*flags))
    for stop in (2, 4, 6):
        its = numbers(train(*flags, *files, "--tensor-parallel-num-weight-shards", "2"))
        # Megatron prints the mean over all steps before the first line
        last = sum(expected[stop - 2 : stop]) / 2 if stop > 2 else expected[1]
        assert its[-1] == pytest.approx(last, rel=2e-3)
        if stop == 2:
            with pytest.raises(RankError, match=r"over 2 ranks .* and this run has 1 and 1"):
                train(*flags, *files)
