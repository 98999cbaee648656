"""Weights that an optimizer cannot start from are refused on all ranks, whoever has them."""

from functools import partial
from typing import Any

import pytest

from megatron_eopt import ConfigurationError
from megatron_eopt.qk_clip.attention import attentions
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.unit.storage.full_state import Case, build

WORDS = {"muon_hyperball": "non-zero norm", "sinkhorn_muon": "negative values"}


def spoiled(optimizer: str, chunk: Any) -> None:
    """Give one matrix of the last of four layers, in the second pipeline stage, bad weights."""
    for param in chunk.parameters():
        if param.dim() == 2:
            param.data.fill_(1 / min(param.shape))
    last = [a for a in attentions(chunk) if a.layer_number == 4]
    for attention in last:
        attention.linear_proj.weight.data.mul_(0 if optimizer == "muon_hyperball" else -1)


def refused(sharded: bool) -> list[str]:
    storage = {"use_distributed_optimizer": sharded}
    config = {**storage, "muon_split_qkv": False}
    model = {"layers": 4, "heads": 4}
    messages = []
    for optimizer, words in WORDS.items():
        case = Case(optimizer, model, {"pp": 2}, ddp=storage, config=config)
        with pytest.raises(ConfigurationError, match=words) as error:
            build(case, partial(spoiled, optimizer))
        messages.append(str(error.value))
        forget_megatron()
    return messages


@pytest.mark.parametrize("sharded", [True, False])
def test_all_ranks_refuse_the_weights_of_one(sharded):
    first, second = run_ranks(2, refused, sharded)
    assert first == second
    assert all("linear_proj.weight" in words for words in first) or not sharded
