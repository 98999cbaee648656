"""Training that stops and goes on equals training that does not: ten steps and ten more, twenty."""

import re

import pytest

from tests.functional.script import train

BASE = """
    --train-iters 20 --lr-decay-iters 20 --save-interval 10 --ckpt-format torch_dist
    --hidden-dropout 0.1 --attention-dropout 0.1 --print-state-checksum
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


def checksums(output: str) -> dict[str, str]:
    """Return the checksum of all weights and state by what was done with them."""
    found = re.findall(r"state checksum: (\w+) \((\w+), iteration (\d+)\)", output)
    return {f"{what} {iteration}": value for value, what, iteration in found}


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
    expected, found = checksums(whole), checksums(resumed)
    assert found["loaded 10"] == expected["saved 10"]
    assert found["saved 20"] == expected["saved 20"]
    losses = re.findall(r"iteration +(\d+)/.*lm loss: (\S+)", whole)
    # the first line after a resume is of two steps' mean
    assert re.findall(r"iteration +(\d+)/.*lm loss: (\S+)", resumed)[2:] == losses[12:]
