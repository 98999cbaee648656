"""The training script with ``--use-torch-fsdp2`` on two CPU processes."""

import re

import pytest

from tests.functional.script import losses, train

# without dropout, so that losses hang on the weights alone
MUON = """
    --optimizer muon --untie-embeddings-and-output-weights --clip-grad 0.5 --print-state-checksum
    --hidden-dropout 0 --attention-dropout 0 --save-interval 3
""".split()
SHARDED = [*MUON, "--use-torch-fsdp2", "--no-gradient-accumulation-fusion"]


def numbers(output):
    return [float(loss) for loss in losses(output)]


def checksums(output):
    """Return checksums of weights and optimizer state by what was done, and the iteration."""
    found = re.findall(r"state checksum: (\w+) \((\w+), iteration (\d+)\)", output)
    return {(what, iteration): value for value, what, iteration in found}


EXACT = ["--swiglu", "--muon-fp32-matmul-prec", "highest"]


@pytest.mark.parametrize(
    "flags",
    [pytest.param(EXACT, id="fp32"), pytest.param(["--bf16"], id="bf16", marks=pytest.mark.long)],
)
def test_training_and_resuming_is_training_with_ddp(tmp_path, flags):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    replicated = numbers(train(*MUON, *flags))
    straight = train(*SHARDED, *flags, "--save", first)
    sharded = numbers(straight)
    assert len(sharded) == 6
    assert sharded[-1] < sharded[0] - 0.05
    # DDP and FSDP2 average two ranks' gradients alike; the sums of their norm differ in order
    assert sharded == pytest.approx(replicated, rel=1e-2 if "--bf16" in flags else 1e-5)
    resumed = train(*SHARDED, *flags, "--load", first, "--ckpt-step", "3", "--save", second)
    assert checksums(straight)[("saved", "3")] == checksums(resumed)[("loaded", "3")]
    assert checksums(straight)[("saved", "6")] == checksums(resumed)[("saved", "6")]
    assert len(set(checksums(straight).values())) == 2
