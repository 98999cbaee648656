"""The trainer as megatron-core 0.20 has it: stand-ins with its signatures, around what there is."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_eopt import EmergingOptimizerConfig, get_megatron_optimizer, megatron_lm
from megatron_eopt.checkpoint import trainer as checkpoint_trainer
from megatron_eopt.megatron_lm.trainer import in_the_usual_layout
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import synthetic_batch, tiny_gpt, train_step, wrap_ddp
from tests.unit.contracts.callers import scheduler_of


def wiring_wrapper(original: Callable[..., Any], layer_wise: Any) -> Callable[..., Any]:
    """Return ``_ddp_wrap`` with 0.20's argument, which wires layer-wise storage by itself."""

    def _ddp_wrap(
        model: Any,
        data_parallel_random_init: Any,
        ddp_config: Any,
        overlap_param_gather_with_optimizer_step: Any,
        use_megatron_fsdp: bool = False,
        use_torch_fsdp2: bool = False,
        use_layer_wise_distributed_optimizer: bool = False,
        *,
        pg_collection: Any,
    ) -> Any:
        if use_layer_wise_distributed_optimizer:
            ddp_config.use_distributed_optimizer = True
            layer_wise.tag_params_for_buffer_routing(model)
        early = overlap_param_gather_with_optimizer_step
        return original(
            model, data_parallel_random_init, ddp_config, early, pg_collection=pg_collection
        )

    return _ddp_wrap


def _buffers_of(installed: bool) -> list[tuple[int, int]]:
    """Return padded and own elements of each buffer; then train with Muon over them."""
    from megatron.core.optimizer import layer_wise_optimizer
    from megatron.training.models import dist_utils

    initialize_megatron()
    torch.manual_seed(1)
    kept = dist_utils._ddp_wrap
    dist_utils._ddp_wrap = wiring_wrapper(kept, layer_wise_optimizer)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    install = megatron_lm.install() if installed else None
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=False)
    try:
        (chunk,) = dist_utils._ddp_wrap(
            [tiny_gpt(layers=1)], False, ddp_config, False, False, False, True, pg_collection=groups
        )
    finally:
        if install is not None:
            install.close()
        dist_utils._ddp_wrap = kept
    config = EmergingOptimizerConfig(
        optimizer="muon", lr=0.01, min_lr=0.01, use_distributed_optimizer=True
    )
    optimizer = get_megatron_optimizer(config, [chunk])
    before = train_step([chunk], optimizer, [synthetic_batch(0)])
    assert train_step([chunk], optimizer, [synthetic_batch(0)]) < before
    assert ddp_config.use_distributed_optimizer
    return [
        (buffer.numel, sum(param.numel() for param in buffer.params)) for buffer in chunk.buffers
    ]


def test_a_wrapper_that_wires_layer_wise_storage_leaves_one_buffer_without_padding():
    for ((padded, own),) in run_ranks(2, _buffers_of, True):
        # Megatron rounds the end of a bucket up so that all shards begin at an aligned address
        assert own <= padded < own + 2 * 128
    for buffers in run_ranks(2, _buffers_of, False):
        assert len(buffers) == 2


def calls_of(names: str, **wanted: Any) -> tuple[bool, Any]:
    """Return what a wrapper with these parameters is asked for, and whether gradients scatter."""
    parameters = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names.split()]
    seen: dict[str, Any] = {}

    def original(**kwargs: Any) -> None:
        seen.update(kwargs)

    original.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    config = SimpleNamespace(use_distributed_optimizer=False)
    in_the_usual_layout(original)(
        ddp_config=config, use_layer_wise_distributed_optimizer=True, **wanted
    )
    return config.use_distributed_optimizer, seen["use_layer_wise_distributed_optimizer"]


ASKS = "ddp_config use_layer_wise_distributed_optimizer"


@pytest.mark.parametrize(
    ("more", "scatters"),
    [
        ({"DP": DistributedDataParallel, "use_layer_wise_param_layout": True}, True),
        ({"DP": DistributedDataParallel, "use_layer_wise_param_layout": False}, False),
        ({"DP": DistributedDataParallel, "layer_wise_param_layout": "padded"}, True),
        ({"DP": DistributedDataParallel, "layer_wise_param_layout": "decoupled"}, True),
        ({"DP": DistributedDataParallel, "layer_wise_param_layout": "legacy"}, False),
        ({"DP": object, "layer_wise_param_layout": "padded"}, False),
        ({"use_megatron_fsdp": False, "use_torch_fsdp2": False}, True),
        ({"use_megatron_fsdp": True, "use_torch_fsdp2": False}, False),
    ],
    ids=str,
)
def test_every_spelling_of_the_layout_means_ours(more, scatters):
    assert calls_of(" ".join((ASKS, *more)), **more) == (scatters, False)


def _rates() -> list[list[tuple[str, float, float, float]]]:
    """Load as 0.20 does with ``--override-opt-param-scheduler``; return rates before and after."""
    from megatron.core.optimizer import ParamKey
    from megatron.training import global_vars

    global_vars.set_args(SimpleNamespace())
    if not parallel_state.model_parallel_is_initialized():
        initialize_megatron()
    chunk = wrap_ddp(tiny_gpt(layers=1))
    config = EmergingOptimizerConfig(
        optimizer="muon", lr=0.01, min_lr=0.001, muon_lr=0.3, muon_min_lr=0.03
    )
    overrides = {ParamKey(name="*.linear_proj.weight"): {"max_lr": 0.5}}
    optimizer = get_megatron_optimizer(config, [chunk], overrides)
    scheduler = scheduler_of(optimizer)

    def load_checkpoint(
        ddp_model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        load_arg: str = "load",
        skip_load_to_model_and_opt: bool = False,
    ) -> int:
        for group in optimizer.param_groups:
            group["max_lr"], group["min_lr"] = 0.01, 0.001
        opt_param_scheduler.step(3)
        return 3

    found = []
    for load in (None, checkpoint_trainer._handing_over(load_checkpoint), load_checkpoint):
        if load is None:
            scheduler.step(3)
        else:
            scheduler.num_steps = 0
            assert load([chunk], optimizer, scheduler) == 3
        keys = ("optimizer", "max_lr", "min_lr", "lr")
        found.append([tuple(group[key] for key in keys) for group in optimizer.param_groups])
    return found


def test_learning_rates_of_groups_survive_loading():
    ((own, loaded, as_upstream),) = run_ranks(1, _rates)
    assert loaded == own
    assert {rates[:3] for rates in own} >= {
        ("muon", 0.3, 0.03),
        ("muon", 0.5, 0.03),
        ("adam", 0.01, 0.001),
    }
    assert {rates[1] for rates in as_upstream} == {0.01}
