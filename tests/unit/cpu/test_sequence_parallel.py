"""Under sequence parallelism torch's norms train as they do on whole sequences."""

from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import synthetic_batch, tiny_gpt, train_step, wrap_ddp

TOLERANCE = 1e-5

MODELS: dict[str, dict[str, Any]] = {
    "layer norm, biases": {"bias": True},
    "rms norm, norms of queries and keys": {
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "query_groups": 2,
        "gated": True,
        "position_embedding": "rope",
    },
}


def _train(model: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the losses, and the weights of the norms."""
    initialize_megatron(tp=2)
    gpt = tiny_gpt(**model)
    norms = {name: p for name, p in gpt.named_parameters() if "layernorm" in name}
    chunk = wrap_ddp(gpt)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2), [chunk])
    losses = [train_step([chunk], optimizer, [synthetic_batch(step)]) for step in range(10)]
    return losses, {name: parameter.detach() for name, parameter in norms.items()}


@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_whole_sequences(name: str) -> None:
    model = MODELS[name]
    (expected, _), _ = run_ranks(2, _train, model)
    (losses, first), (_, second) = run_ranks(2, _train, model | {"sequence_parallel": True})
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[norm], second[norm]) for norm in first)
