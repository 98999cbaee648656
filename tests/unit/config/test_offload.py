"""Off-loading needs its flag; the fraction alone turns nothing on."""

import itertools

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


def off_loaded_adam():
    initialize_megatron()
    model = wrap_ddp(tiny_gpt(dtype=torch.bfloat16), use_distributed_optimizer=True)
    found = []
    for cls, fraction in itertools.product((OptimizerConfig, EmergingOptimizerConfig), (0.5, 1.0)):
        config = cls(
            optimizer="adam",
            lr=1e-3,
            bf16=True,
            use_distributed_optimizer=True,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=fraction,
        )
        with pytest.raises(ConfigurationError) as raised:
            get_megatron_optimizer(config, [model])
        found.append(str(raised.value))
    return found


def test_megatrons_adam_is_not_off_loaded_without_a_gpu():
    """Its first step would end in a KeyError."""
    for text in itertools.chain(*run_ranks(3, off_loaded_adam)):
        assert text.startswith("optimizer_cpu_offload=True: megatron-core's optimizer that")
        assert "needs a GPU" in text
