"""What is refused when the optimizer is built."""

from dataclasses import replace

import pytest

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig, get_megatron_optimizer
from megatron_eopt.testing.scene import forget_megatron
from megatron_eopt.wrappers.chain import OptimizerChain
from tests.harness import run_ranks
from tests.unit.megatron_fsdp.runs import make_chunk, make_optimizer
from tests.unit.storage.runs import DENSE, Run

SMALL = Run(model={**DENSE, "layers": 1})
HYBRID = {
    "parallel": {"optimizer_instances": 2},
    "ddp": {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"},
}

# how the model is wrapped, what is set afterwards, since some modes need GPUs, and the message
CASES = [
    (HYBRID, {}, "outer_dp_sharding_strategy='optim': does not divide gradients"),
    ({}, {"megatron_fsdp_cuda_graph_mode": True}, "leaves gradients"),
    ({}, {"megatron_fsdp_use_decoupled_grad": True}, "Transformer Engine's Adam only"),
    ({"config": {"fp16": True}}, {}, "fp16=True: needs a loss scale"),
    ({"model": {**SMALL.model, "qk_clip": True}}, {}, "use_megatron_fsdp shards the rows"),
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
    chunks = [make_chunk(SMALL), make_chunk(SMALL)]
    with pytest.raises(ConfigurationError, match="model_chunks=2: must be one"):
        get_megatron_optimizer(EmergingOptimizerConfig(use_distributed_optimizer=True), chunks)
    with pytest.raises(ConfigurationError, match="state_dict='NoneType': must be a mapping"):
        make_optimizer(SMALL, chunks[0]).load_state_dict(None)
    forget_megatron()
    # a mode of Adam that megatron-core has alone
    adam = replace(SMALL, config={"optimizer": "adam", "fp16": True})
    assert not isinstance(make_optimizer(adam, make_chunk(adam)), OptimizerChain)
    return found


def test_what_is_not_served_is_refused_with_the_reason():
    for messages in run_ranks(2, refused, timeout=120):
        for message, (*_, expected) in zip(messages, CASES, strict=True):
            assert expected in message
