"""HybridModel through the trainer, by the flag that asks for it; cases resume it."""

import pytest

from tests.functional.script import losses, train

MUON = [
    *"--optimizer muon --use-distributed-optimizer --position-embedding-type rope".split(),
    *"--hidden-dropout 0 --attention-dropout 0".split(),
]
TWO_LAYERS = ["--hybrid-layer-pattern", "*-*-"]


@pytest.mark.long
def test_it_goes_on_from_a_gpt_model_and_its_optimizer_state(tmp_path):
    gpt = losses(train(*MUON, "--save", str(tmp_path), "--save-interval", "3"))
    hybrid = losses(train(*MUON, *TWO_LAYERS, "--load", str(tmp_path), "--ckpt-step", "3"))
    assert len(hybrid) == 3
    # the trainer prints the mean of a run's first two losses for the second
    assert hybrid[0::2] == gpt[3::2]
