"""The trainer and checkpoints of another optimizer or layout, which both ranks refuse alike."""

import re
from pathlib import Path

import pytest

from tests.functional.script import TINY, _run_once, losses, run_here, run_stock, train
from tests.harness import run_ranks

# the schedule of a longer run is another one
SHARDED = ["--use-distributed-optimizer", "--override-opt-param-scheduler"]
MUON = ["--optimizer", "muon", *SHARDED]
ADAM = ["--optimizer", "adam", *SHARDED]
TP2 = ["--tensor-model-parallel-size", "2"]
TORCH = ["--ckpt-format", "torch"]


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


def save(folder: Path, *flags: str) -> None:
    saving = ["--save", str(folder), "--save-interval", "2"]
    train("--train-iters", "2", *flags, *saving, timeout=240)


@pytest.mark.long
def test_files_of_another_optimizer_are_refused(tmp_path):
    save(tmp_path, *ADAM, *TORCH)
    error = refused(tmp_path, *MUON, *TORCH)
    assert "mp_rank_00/layer_wise_optimizer_0.pt cannot be read" in error
    assert "--no-load-optim" in error
    fresh = [*MUON, *TORCH, "--no-load-optim", "--load", str(tmp_path)]
    output = train("--train-iters", "3", *fresh, timeout=240)
    assert re.search(r"successfully loaded checkpoint .* at iteration 2", output)
    assert losses(output)


@pytest.mark.long
@pytest.mark.parametrize("present", [MUON, ADAM], ids=["muon", "adam"])
def test_megatrons_buckets_are_loaded_at_another_layout(tmp_path, present):
    flags = [*TINY, *ADAM, "--save", str(tmp_path), "--save-interval", "2"]
    run_ranks(2, run_here, run_stock, [*flags, "--train-iters", "2"], cpu=False, timeout=240)
    # dropout depends on the layout
    still = ["--hidden-dropout", "0", "--attention-dropout", "0"]
    more = ["--train-iters", "5", *present, *still, "--load", str(tmp_path)]
    found = [losses(train(*more, *layout, timeout=240)) for layout in ([], TP2)]
    as_written, other = ([float(loss) for loss in its] for its in found)
    assert len(other) == 3
    # sums of another order, over three steps
    assert as_written == pytest.approx(other, rel=1e-4)


@pytest.mark.long
def test_megatrons_buckets_of_experts_are_refused_at_another_expert_parallelism(tmp_path):
    experts = ["--num-experts", "4", "--expert-model-parallel-size"]
    flags = [*TINY, *ADAM, *experts, "2", "--save", str(tmp_path), "--save-interval", "2"]
    run_ranks(2, run_here, run_stock, [*flags, "--train-iters", "2"], cpu=False, timeout=240)
    error = refused(tmp_path, *ADAM, *experts, "1")
    # the cause comes first, not a list of parameters, nor a flag that does not help
    assert error.startswith("ConfigurationError: checkpoint='dp_reshardable': this form of Adam's")
