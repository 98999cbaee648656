"""HybridModel through the trainer, by the flag that asks for it."""

import pytest

from tests.functional.saved_states import differing
from tests.functional.script import losses, train

MUON = [
    *"--optimizer muon --use-distributed-optimizer --position-embedding-type rope".split(),
    *"--hidden-dropout 0 --attention-dropout 0".split(),
]
TWO_LAYERS = ["--hybrid-layer-pattern", "*-*-"]


@pytest.mark.parametrize(
    "layout", ["--tensor-model-parallel-size", "--pipeline-model-parallel-size"]
)
def test_it_trains_and_goes_on_bit_equal(tmp_path, layout):
    flags = [*MUON, *TWO_LAYERS, layout, "2", "--save-interval", "3"]
    first, again = (str(tmp_path / name) for name in ("first", "again"))
    whole = [float(loss) for loss in losses(train(*flags, "--save", first))]
    assert whole[-1] < whole[0] - 0.05
    train(*flags, "--load", first, "--ckpt-step", "3", "--save", again)
    assert differing(*(tmp_path / name / "iter_0000006" for name in ("first", "again"))) == []


def test_it_goes_on_from_a_gpt_model_and_its_optimizer_state(tmp_path):
    gpt = losses(train(*MUON, "--save", str(tmp_path), "--save-interval", "3"))
    hybrid = losses(train(*MUON, *TWO_LAYERS, "--load", str(tmp_path), "--ckpt-step", "3"))
    assert len(hybrid) == 3
    # the trainer prints the mean of a run's first two losses for the second
    assert hybrid[0::2] == gpt[3::2]
