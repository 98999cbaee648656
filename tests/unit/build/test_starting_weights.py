"""Weights that an optimizer cannot start from are refused on all ranks, whoever has them."""

from functools import partial
from typing import Any

import pytest
import torch

from megatron_eopt import ConfigurationError
from megatron_eopt.build.bases import fault_in
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.qk_clip.attention import attentions
from tests.harness import run_ranks
from tests.unit.fsdp2 import model as fsdp2
from tests.unit.stores.full_state import Case, build

WORDS = {"muon_hyperball": "non-zero norm", "sinkhorn_muon": "negative values"}


def spoiled(optimizer: str, chunk: Any) -> None:
    """Give one matrix of the last of four layers, in the second pipeline stage, bad weights."""
    for param in chunk.parameters():
        if param.dim() == 2:
            param.data.fill_(1 / min(param.shape))
    last = [a for a in attentions(chunk) if a.layer_number == 4]
    for attention in last:
        attention.linear_proj.weight.data.mul_(0 if optimizer == "muon_hyperball" else -1)


def refused(case: Case) -> str:
    with pytest.raises(ConfigurationError) as error:
        build(case, partial(spoiled, case.optimizer))
    return str(error.value)


@pytest.mark.parametrize("optimizer", WORDS)
@pytest.mark.parametrize(
    ("world", "parallel", "sharded"),
    [(1, {}, False), (2, {}, True), (2, {"pp": 2}, True), (2, {"pp": 2}, False)],
)
def test_by_megatrons_storages(optimizer, world, parallel, sharded):
    storage = {"use_distributed_optimizer": sharded}
    config = {**storage, "muon_split_qkv": False}
    model = {"layers": 4, "heads": 4}
    case = Case(optimizer, model, parallel, ddp=storage, config=config)
    words = run_ranks(world, refused, case)
    assert WORDS[optimizer] in words[0]
    assert words == [words[0]] * world
    assert "linear_proj.weight" in words[0] or not sharded


@fsdp2.eager
def refused_by_fsdp2(optimizer: str) -> str:
    model = fsdp2.make_model("fsdp")
    for param in model.parameters():
        param.data.zero_()
    with pytest.raises(ConfigurationError) as error:
        build_optimizer(model, fsdp2.config(optimizer))
    return str(error.value)


def test_by_fsdp2():
    words = run_ranks(2, refused_by_fsdp2, "muon_hyperball", cpu=False)
    assert WORDS["muon_hyperball"] in words[0]
    assert words[0] == words[1]


def test_weights_that_would_be_changed_are_no_start():
    def halving(groups: Any, scale: float) -> Any:
        for param in groups[0]["params"]:
            param.data.mul_(scale)

    weights = [torch.tensor([[1.0, torch.nan, 2.0]])]
    assert fault_in(partial(halving, scale=1.0), weights) is None
    assert "would be changed" in str(fault_in(partial(halving, scale=0.5), weights))
    assert weights[0].nan_to_num().tolist() == [[1.0, 0.0, 2.0]]
