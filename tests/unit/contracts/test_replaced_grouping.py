"""ms-swift replaces megatron-core's private grouping function; that must not be ignored."""

import functools
from typing import Any

import pytest
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import OptimizerConfig, ParamKey

from megatron_eopt import ConfigurationError, get_megatron_optimizer
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import tiny_gpt, wrap_ddp

CONFIG = {"optimizer": "muon", "lr": 0.01, "min_lr": 0.001}


def _replaced() -> str:
    initialize_megatron()
    chunk = wrap_ddp(tiny_gpt(layers=1))
    original = megatron_optimizer._get_param_groups

    @functools.wraps(original)
    def with_a_learning_rate_of_its_own(*args: Any, **kwargs: Any) -> Any:
        groups = original(*args, **kwargs)
        groups[0]["max_lr"] = 0.5
        return groups

    megatron_optimizer._get_param_groups = with_a_learning_rate_of_its_own
    try:
        with pytest.raises(ConfigurationError, match="config_overrides") as caught:
            get_megatron_optimizer(OptimizerConfig(**CONFIG), [chunk])
    finally:
        megatron_optimizer._get_param_groups = original
    # the way out that the message names
    overrides = {ParamKey(name="*word_embeddings*"): {"max_lr": 0.5}}
    optimizer = get_megatron_optimizer(OptimizerConfig(**CONFIG), [chunk], overrides)
    assert {group["max_lr"] for group in optimizer.param_groups} == {0.01, 0.5}
    return str(caught.value)


def test_a_replaced_grouping_is_refused_with_the_way_out():
    assert "_get_param_groups=" in run_ranks(1, _replaced)[0]
