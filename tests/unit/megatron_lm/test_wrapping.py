"""What the trainer's wrapper is asked for where a run wants layer-wise storage."""

from types import SimpleNamespace

import pytest
from megatron.core.distributed import DistributedDataParallel

from megatron_eopt.megatron_lm.trainer import with_standard_layout


@pytest.mark.parametrize(
    ("wrapper", "layout", "scatters"),
    [
        (DistributedDataParallel, True, True),
        (DistributedDataParallel, False, False),
        (object, True, False),
    ],
)
def test_layer_wise_storage_of_the_trainer_means_ours(wrapper, layout, scatters):
    def asked(*, ddp_config, use_layer_wise_distributed_optimizer, DP, use_layer_wise_param_layout):
        return ddp_config.use_distributed_optimizer, use_layer_wise_distributed_optimizer

    found = with_standard_layout(asked)(
        ddp_config=SimpleNamespace(use_distributed_optimizer=False),
        use_layer_wise_distributed_optimizer=True,
        DP=wrapper,
        use_layer_wise_param_layout=layout,
    )
    assert found == (scatters, False)
