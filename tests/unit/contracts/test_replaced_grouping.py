"""ms-swift replaces megatron-core's private grouping function; what it says must count."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import OptimizerConfig, ParamKey
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_eopt import get_megatron_optimizer
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import forward_backward, synthetic_batch, tiny_gpt, wrap_ddp

CONFIG = {"optimizer": "muon", "lr": 0.01, "min_lr": 0.001}
ORIGINAL = megatron_optimizer._get_param_groups


@contextlib.contextmanager
def replaced(by: Callable[..., Any]) -> Iterator[None]:
    megatron_optimizer._get_param_groups = by
    try:
        yield
    finally:
        megatron_optimizer._get_param_groups = ORIGINAL


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


def build(layer_wise: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    chunk = wrap_ddp(tiny_gpt(layers=1), use_distributed_optimizer=layer_wise)
    config = OptimizerConfig(**CONFIG, use_distributed_optimizer=layer_wise)
    return chunk, functools.partial(get_megatron_optimizer, config, [chunk])


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    groups = optimizer.param_groups
    return [{k: v for k, v in g.items() if k not in ("params", "group_id")} for g in groups]


def _means_the_same_as_overrides(layer_wise: bool) -> None:
    initialize_megatron()
    outcomes = []
    for by_replacing in (True, False):
        chunk, factory = build(layer_wise)
        if by_replacing:
            with replaced(embeddings_at_half):
                optimizer = factory()
        else:
            standard = megatron_optimizer.get_standard_config_overrides(OptimizerConfig(**CONFIG))
            optimizer = factory({**standard, ParamKey(name="*word_embeddings*"): {"max_lr": 0.5}})
        for group in optimizer.param_groups:
            group["lr"] = group["max_lr"]
        optimizer.zero_grad()
        forward_backward([chunk], [synthetic_batch(0)])
        optimizer.step()
        weights = {name: p.detach().clone() for name, p in chunk.named_parameters()}
        outcomes.append((settings_of(optimizer), weights))
    (groups, weights), (expected_groups, expected_weights) = outcomes
    assert groups == expected_groups
    assert {group["max_lr"] for group in groups} == {0.01, 0.5}
    for name, weight in weights.items():
        assert torch.equal(weight, expected_weights[name]), name


@pytest.mark.parametrize("layer_wise", [False, True])
def test_a_replaced_grouping_means_the_same_as_overrides(layer_wise):
    run_ranks(2, _means_the_same_as_overrides, layer_wise)
