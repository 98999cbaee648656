"""The trainer and checkpoints of another optimizer or layout, which both ranks refuse alike."""

import re
from pathlib import Path

import pytest

from tests.functional.script import TINY, _run_once, losses, run_here, run_stock, save, train
from tests.harness import run_ranks

# the schedule of a longer run is another one
SHARDED = ["--use-distributed-optimizer", "--override-opt-param-scheduler"]
MUON = ["--optimizer", "muon", *SHARDED]
ADAM = ["--optimizer", "adam", *SHARDED]
TP2 = ["--tensor-model-parallel-size", "2"]
EXPERTS = ["--num-experts", "4", "--expert-model-parallel-size"]


def _error_of(flags: list[str]) -> str:
    """Run the script; return what it raises."""
    try:
        _run_once(flags)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused(folder: Path, *flags: str) -> str:
    """Let two ranks fail to load ``folder``; return the error, which both must raise alike."""
    arguments = [*TINY, "--train-iters", "3", *flags, "--load", str(folder)]
    errors = run_ranks(2, _error_of, arguments, cpu=False, timeout=240)
    assert errors[0] == errors[1]
    assert errors[0], "it was loaded"
    return errors[0]


@pytest.mark.long
def test_sharded_state_is_not_saved_in_format_torch(tmp_path):
    """Only megatron-core's own Adam and SGD, alone, are."""
    torch = ["--ckpt-format", "torch"]
    save(tmp_path, *ADAM, *torch)
    for flags in ([*MUON, *torch], MUON):
        assert "that the distributed optimizer shards" in refused(tmp_path, *flags)
    weights = [*MUON, "--no-load-optim", "--load", str(tmp_path)]
    output = train("--train-iters", "3", *weights, timeout=240)
    assert re.search(r"successfully loaded checkpoint .* at iteration 2", output)
    assert losses(output)


@pytest.mark.long
@pytest.mark.parametrize(
    ("present", "layout", "other"),
    [(MUON, [], TP2), (ADAM, [], TP2), (ADAM, [*EXPERTS, "2"], [*EXPERTS, "1"])],
    ids=["muon", "adam", "experts"],
)
def test_megatrons_buckets_are_loaded_at_the_same_layout(tmp_path, present, layout, other):
    flags = [*TINY, *ADAM, *layout, "--save", str(tmp_path), "--save-interval", "2"]
    run_ranks(2, run_here, run_stock, [*flags, "--train-iters", "2"], cpu=False, timeout=240)
    more = ["--train-iters", "5", *present, *layout, "--load", str(tmp_path)]
    assert len(losses(train(*more, timeout=240))) == 3
    # the cause comes first, not a list of parameters
    error = refused(tmp_path, *present, *other)
    assert error.startswith("CheckpointError: checkpoint='dp_reshardable': this form of Adam's")
