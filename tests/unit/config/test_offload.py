"""Off-loading needs its flag; the fraction alone turns nothing on."""

import pytest
import torch

import megatron_eopt.optimizers.built_in  # noqa: F401  registers optimizers
from megatron_eopt import (
    ConfigurationError,
    EmergingOptimizerConfig,
    OptimizerConfig,
    get_megatron_optimizer,
)
from megatron_eopt.config.settings import resolve
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import tiny_gpt, wrap_ddp


@pytest.mark.parametrize(("flag", "expected"), [(False, 0.0), (True, 0.5)])
def test_the_flag_decides(flag, expected):
    config = EmergingOptimizerConfig(
        optimizer="muon",
        lr=1e-3,
        use_distributed_optimizer=True,
        optimizer_cpu_offload=flag,
        optimizer_offload_fraction=0.5,
    )
    assert resolve(config).offload_fraction == expected


def off_loaded_adam(config_class, fraction):
    initialize_megatron()
    model = wrap_ddp(tiny_gpt(dtype=torch.bfloat16), use_distributed_optimizer=True)
    config = config_class(
        optimizer="adam",
        lr=1e-3,
        bf16=True,
        use_distributed_optimizer=True,
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=fraction,
    )
    with pytest.raises(ConfigurationError) as raised:
        get_megatron_optimizer(config, [model])
    return str(raised.value)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("config_class", [OptimizerConfig, EmergingOptimizerConfig])
def test_megatrons_adam_is_not_off_loaded_without_a_gpu(ranks, fraction, config_class):
    """Its first step would end in a KeyError."""
    for text in run_ranks(ranks, off_loaded_adam, config_class, fraction):
        assert text.startswith("optimizer_cpu_offload=True: megatron-core's optimizer that")
        assert "needs a GPU" in text
