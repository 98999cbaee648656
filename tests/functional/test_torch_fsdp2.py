"""The training script with ``--use-torch-fsdp2`` on two CPU processes."""

import pytest

from tests.functional.saved_states import differing
from tests.functional.script import losses, train

# without dropout, so that losses hang on the weights alone
MUON = """
    --optimizer muon --untie-embeddings-and-output-weights --clip-grad 0.5
    --hidden-dropout 0 --attention-dropout 0 --save-interval 3
""".split()
SHARDED = [*MUON, "--use-torch-fsdp2", "--no-gradient-accumulation-fusion"]


def numbers(output):
    return [float(loss) for loss in losses(output)]


EXACT = ["--swiglu", "--muon-fp32-matmul-prec", "highest"]


@pytest.mark.parametrize(
    "flags",
    [pytest.param(EXACT, id="fp32"), pytest.param(["--bf16"], id="bf16", marks=pytest.mark.long)],
)
def test_training_and_resuming_is_training_with_ddp(tmp_path, flags):
    first, second = tmp_path / "first", tmp_path / "second"
    replicated = numbers(train(*MUON, *flags))
    sharded = numbers(train(*SHARDED, *flags, "--save", str(first)))
    assert len(sharded) == 6
    assert sharded[-1] < sharded[0] - 0.05
    # DDP and FSDP2 average two ranks' gradients alike; the sums of their norm differ in order
    assert sharded == pytest.approx(replicated, rel=1e-2 if "--bf16" in flags else 1e-5)
    going_on = ["--load", str(first), "--ckpt-step", "3", "--save", str(second)]
    train(*SHARDED, *flags, *going_on)
    assert not differing(first / "iter_0000006", second / "iter_0000006")
    assert len(differing(first / "iter_0000003", first / "iter_0000006")) > 20
