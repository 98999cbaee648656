"""Training that stops and goes on equals training that does not: ten steps and ten more, twenty."""

import re

import pytest

from tests.functional.saved_states import differing
from tests.functional.script import train

BASE = """
    --train-iters 20 --lr-decay-iters 20 --save-interval 10 --ckpt-format torch_dist
    --hidden-dropout 0.1 --attention-dropout 0.1
""".split()
SHARDED = ["--use-distributed-optimizer"]

# Megatron heeds the first with the second alone
IN_BACKGROUND = ["--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"]

RUNS = {
    "muon": ["muon", *SHARDED],
    "muon-plain": ["muon"],
    "muon-async": ["muon", *SHARDED, *IN_BACKGROUND],
    "muon-fully-reshardable": ["muon", *SHARDED, "--dist-ckpt-optim-fully-reshardable"],
    "adaptive_muon": ["adaptive_muon", *SHARDED],
    "soap": ["soap", *SHARDED],
    "lion": ["lion", *SHARDED],
    "adam": ["adam", *SHARDED],
    "adam-fully-reshardable": ["adam", *SHARDED, "--dist-ckpt-optim-fully-reshardable"],
    "adam-plain": ["adam"],
}


@pytest.mark.long
@pytest.mark.parametrize("precision", ["", "--bf16"], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", RUNS)
def test_stop_and_go_on(tmp_path, name, precision):
    flags = [*BASE, "--optimizer", *RUNS[name], *precision.split()]
    whole = train(*flags, "--save", str(tmp_path / "whole"), timeout=300)
    resumed = train(
        *flags,
        "--load",
        str(tmp_path / "whole"),
        "--ckpt-step",
        "10",
        "--save",
        str(tmp_path / "resumed"),
        timeout=300,
    )
    assert not differing(*(tmp_path / name / "iter_0000020" for name in ("whole", "resumed")))
    losses = re.findall(r"iteration +(\d+)/.*lm loss: (\S+)", whole)
    # the first line after a resume is of two steps' mean
    assert re.findall(r"iteration +(\d+)/.*lm loss: (\S+)", resumed)[2:] == losses[12:]
