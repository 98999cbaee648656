"""ms-swift replaces megatron-core's private grouping function; what it says must count."""

import functools
from typing import Any
from unittest import mock

import pytest
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import ParamKey, get_standard_config_overrides

from megatron_eopt import get_megatron_optimizer
from tests.harness import run_ranks
from tests.harness.models import assert_same, copies_of
from tests.unit.contracts.callers import STORAGES, build, gradients

ORIGINAL = megatron_optimizer._get_param_groups


@functools.wraps(ORIGINAL)
def embeddings_at_half(model_chunks: Any, config: Any, config_overrides: Any) -> Any:
    """Give embeddings a learning rate of their own, as ms-swift gives one to a vision tower."""
    groups = ORIGINAL(model_chunks, config, config_overrides)
    apart = {
        id(param)
        for chunk in model_chunks
        for name, param in chunk.named_parameters()
        if "word_embeddings" in name
    }
    result = []
    for group in groups:
        own = [param for param in group["params"] if id(param) in apart]
        rest = [param for param in group["params"] if id(param) not in apart]
        result.append({**group, "params": rest})
        if own:
            result.append({**group, "params": own, "max_lr": 0.5, "default_config": False})
    return result


def _means_the_same_as_overrides(storage: str) -> None:
    outcomes = []
    for by_replacing in (True, False):
        chunk, optimizer = build(STORAGES[storage])
        config, overrides = optimizer.config, None
        if not by_replacing:
            own = {ParamKey(name="*word_embeddings*"): {"max_lr": 0.5}}
            overrides = {**get_standard_config_overrides(config), **own}
        by = embeddings_at_half if by_replacing else ORIGINAL
        with mock.patch.object(megatron_optimizer, "_get_param_groups", by):
            optimizer = get_megatron_optimizer(config, [chunk], overrides)
        for group in optimizer.param_groups:
            group["lr"] = group["max_lr"]
        gradients(chunk, optimizer, 0)
        optimizer.step()
        settings = [
            {name: value for name, value in group.items() if name not in ("params", "group_id")}
            for group in optimizer.param_groups
        ]
        outcomes.append((settings, copies_of(chunk)))
    (groups, weights), (expected_groups, expected_weights) = outcomes
    assert groups == expected_groups
    assert {group["max_lr"] for group in groups} == {0.01, 0.5}
    assert_same(weights, expected_weights)


@pytest.mark.parametrize("storage", ["replicated-muon", "layer-wise-muon"])
def test_a_replaced_grouping_means_the_same_as_overrides(storage):
    run_ranks(STORAGES[storage].world, _means_the_same_as_overrides, storage)
