"""What is refused when the optimizer is built; and that refusing hybrid sharding is right."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer as megatrons_own

from megatron_eopt import ConfigurationError
from tests.harness import run_ranks
from tests.harness.models import forward_backward, synthetic_batch
from tests.harness.scene import forget_megatron
from tests.unit.megatron_fsdp.runs import make_chunk, make_optimizer
from tests.unit.stores.runs import DENSE, Run

SMALL = Run(model={**DENSE, "layers": 1})
HYBRID = {
    "parallel": {"optimizer_instances": 2},
    "ddp": {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"},
}

# how the model is wrapped, what is set afterwards, since some modes need GPUs, and the message
CASES = [
    (HYBRID, {}, "outer_dp_sharding_strategy='optim': does not divide gradients"),
    ({}, {"megatron_fsdp_cuda_graph_mode": True}, "leaves gradients"),
    ({}, {"megatron_fsdp_use_decoupled_grad": True}, "Transformer Engine's Adam alone"),
    ({"config": {"fp16": True}}, {}, "fp16=True: needs a loss scale"),
    ({"model": {**SMALL.model, "qk_clip": True}}, {}, "qk_clip=True: scales rows"),
]


def refused() -> list[str]:
    found = []
    for fields, flags, _ in CASES:
        run = replace(SMALL, **fields)
        chunk = make_chunk(run)
        vars(chunk.ddp_config).update(flags)
        with pytest.raises(ConfigurationError) as caught:
            make_optimizer(run, chunk)
        found.append(str(caught.value))
        forget_megatron()
    return found


def test_what_is_not_served_is_refused_with_the_reason():
    for messages in run_ranks(2, refused, timeout=120):
        for message, (*_, expected) in zip(messages, CASES, strict=True):
            assert expected in message


def norm_of_gradients(fields: dict[str, Any]) -> float:
    """Return the norm of one real gradient as megatron-core's own optimizer counts it."""
    chunk = make_chunk(replace(SMALL, **fields))
    config = OptimizerConfig(optimizer="adam", lr=0.1, use_distributed_optimizer=True)
    optimizer = megatrons_own(config, [chunk])
    optimizer.zero_grad()
    # the same batch on both ranks: the mean of their gradients is each one's
    forward_backward([chunk], [synthetic_batch(0)])
    squares = torch.zeros(())
    for param in chunk.parameters():
        if param.grad is not None:
            squares += param.grad.to_local().square().sum()
    if "parallel" in fields:
        torch.distributed.all_reduce(squares)
    return float(squares.sqrt())


def test_upstream_does_not_divide_gradients_of_hybrid_sharding():
    outer = {"parallel": HYBRID["parallel"], "ddp": {"num_distributed_optimizer_instances": 2}}
    # replicas of one rank each: both hold all gradients
    replicated = run_ranks(2, norm_of_gradients, outer)[0] / 2**0.5
    hybrid = run_ranks(2, norm_of_gradients, HYBRID)[0]
    assert hybrid == pytest.approx(2 * replicated, rel=1e-5)
