"""HybridModel through the trainer, by the flag that asks for it; cases resume it."""

import pytest

from tests.functional.script import losses, train
from tests.harness import RankError

MUON = "--optimizer muon --use-distributed-optimizer --position-embedding-type rope".split()


@pytest.mark.long
def test_it_goes_on_from_the_weights_of_a_gpt_model(tmp_path):
    train(*MUON, "--save", str(tmp_path), "--save-interval", "3")
    hybrid = [*MUON, "--hybrid-layer-pattern", "*-*-", "--load", str(tmp_path), "--ckpt-step", "3"]
    with pytest.raises(RankError, match="optimizer state does not load into a HybridModel"):
        train(*hybrid)
    assert len(losses(train(*hybrid, "--no-load-optim"))) == 3
