"""Copies of optimizers, which could not step, are refused at once."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.unit.storage.full_state import Case, build
from tests.unit.storage.runs import REPLICATED

COPY = (copy.copy, copy.deepcopy, pickle.dumps, lambda item: torch.save(item, io.BytesIO()))


def refuse_all(optimizer) -> None:
    for function in COPY:
        with pytest.raises(ConfigurationError, match="cannot be copied"):
            function(optimizer)


def test_own_loop():
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.1)
    refuse_all(build_optimizer(nn.Linear(4, 4), config))


def chains() -> None:
    for case in (Case(), Case(**REPLICATED)):
        refuse_all(build(case)[1])
        forget_megatron()


def test_megatrons_loop():
    run_ranks(1, chains)


def test_a_hook_may_replace_the_state_dict():
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.1)
    saved = build_optimizer(model, config).state_dict()
    saved["state"][0]["momentum_buffer"].fill_(3.0)
    optimizer = build_optimizer(model, config)
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: {**state_dict, **saved})
    optimizer.load_state_dict({"state": {}, "param_groups": []})
    (state,) = optimizer.state.values()
    assert (state["momentum_buffer"] == 3).all()
    assert state["momentum_buffer"].dtype == torch.float32
