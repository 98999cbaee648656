"""Megatron's trainers with ``megatron_fsdp_version=2``, which megatron-core has from 0.20 on.

With an older release, run them against a checkout: ``UPSTREAM=/path/to/Megatron-LM``.
"""

from dataclasses import replace

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch.distributed.tensor import DTensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.contrib import megatron_fsdp_v2 as _v2  # noqa: F401  registers itself
from tests.harness import run_ranks
from tests.unit.fsdp2.models import whole
from tests.unit.megatron_fsdp.runs import (
    FullyShardedDataParallel,
    make_optimizer,
    stepped,
    train_in_ddp,
)
from tests.unit.storage import runs
from tests.unit.storage.runs import MOE, ZERO_EVERY, Result, Run, deviation, global_name, slab_of

pytestmark = pytest.mark.skipif(
    not hasattr(DistributedDataParallelConfig, "megatron_fsdp_version"),
    reason="needs megatron-core 0.20, such as UPSTREAM=/path/to/Megatron-LM",
)


def wrap(model, use_distributed_optimizer, **flags):
    config = get_model_config(model)
    config.gradient_accumulation_fusion = False
    flags |= {"use_megatron_fsdp": True, "megatron_fsdp_version": 2}
    flags |= {"data_parallel_sharding_strategy": "optim_grads_params"}
    groups = ProcessGroupCollection.use_mpu_process_groups()
    ddp_config = DistributedDataParallelConfig(**flags)
    return FullyShardedDataParallel(config, ddp_config, model, pg_collection=groups)


def inject(run, chunk, step):
    """Set the gradients that a reduction would leave."""
    for name, param in chunk.named_parameters():
        slab = slab_of(name, param, run.model.get("gated", False))
        values = runs.global_values(global_name(name, run.model), slab, param.shape, 1 + step)
        # zeros to be counted
        values.view(-1)[::ZERO_EVERY] = 0
        unit = param._mfsdp_parameter_group()
        number = [member.sharded is param for member in unit.fsdp_parameters].index(True)
        held = unit.main_weight._get_owned_range(number)
        start, numel = (held.tensor_relative_offset, held.numel) if held else (0, 0)
        local = values.reshape(-1)[start : start + numel].view(-1, *param.shape[1:])
        param.grad = DTensor.from_local(
            local.contiguous(),
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )


def train(run):
    chunk = runs.make_chunk(run, wrap)
    config = {**run.config, "use_distributed_optimizer": False}
    optimizer = make_optimizer(replace(run, config=config), chunk)
    steps = stepped(run, chunk, optimizer, 0, run.steps, inject)
    with pytest.raises(
        ConfigurationError, match=r"megatron_fsdp_version.*saves no optimizer state"
    ):
        optimizer.sharded_state_dict({})
    weights = {
        global_name(name, run.model): (
            slab_of(name, param, run.model.get("gated", False)),
            whole(param),
        )
        for name, param in chunk.named_parameters()
    }
    return Result(weights, steps)


RUNS = {
    "muon": (2, Run(steps=4)),
    "soap": (2, Run(steps=4, config={"optimizer": "soap"})),
    "adam": (2, Run(steps=4, config={"optimizer": "adam"})),
    "experts": (4, Run(model=MOE, steps=4, parallel={"ep": 2})),
}


@pytest.mark.parametrize("name", RUNS)
def test_weights_norm_and_zeros_equal_one_process(name):
    world, run = RUNS[name]
    run = replace(run, config={"log_num_zeros_in_grad": True, **run.config})
    expected = run_ranks(1, train_in_ddp, replace(run, parallel={}))[0]
    results = run_ranks(world, train, run)
    assert deviation(results, expected) < 1e-6
    runs.check_steps(results, expected)
