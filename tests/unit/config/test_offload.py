"""Off-loading needs its flag; the fraction alone turns nothing on."""

import pytest

import megatron_eopt.optimizers.built_in  # noqa: F401  registers optimizers
from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.config.settings import resolve


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
