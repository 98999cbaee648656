"""Megatron-Bridge's documented call of an optimizer configuration, made by hand."""

import dataclasses
from typing import Any

import pytest
import torch
import yaml
from megatron.core import dist_checkpointing
from megatron.core.optimizer import ChainedOptimizer, ParamKey
from megatron.core.optimizer import OptimizerConfig as MegatronConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.training.config.container import ConfigContainerBase
from megatron.training.config.instantiate_utils import instantiate

from megatron_eopt import ConfigurationTypeError, EmergingOptimizerConfig, get_megatron_optimizer
from megatron_eopt.bridge import BridgeOptimizerConfig
from tests.harness.each_rank import on_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import synthetic_batch, tiny_gpt, train_step, wrap_ddp
from tests.unit.contracts.callers import scheduler_of

USERS = {"optimizer": "muon", "use_distributed_optimizer": True, "lr": 0.01, "min_lr": 0.001}
"""What the documentation tells a user to set."""


def _wrapped(config: Any, dtype: torch.dtype) -> Any:
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    return wrap_ddp(
        tiny_gpt(layers=1, bias=True, dtype=dtype),
        use_distributed_optimizer=config.use_distributed_optimizer,
        overlap_param_gather=config.overlap_param_gather,
        overlap_grad_reduce=config.overlap_param_gather,
    )


def _as_the_bridge_sets_up(overrides: Any = None) -> tuple[Any, Any, Any]:
    """Mixed precision, overlap and timers are written, ``finalize`` called, then ``provide``."""
    config = BridgeOptimizerConfig(**USERS)
    config.bf16 = True
    config.overlap_param_gather = True
    config.finalize()
    config.use_distributed_optimizer = True
    config.finalize()
    config.timers = None
    chunk = _wrapped(config, torch.bfloat16)
    optimizer = config.provide(
        model_chunks=[chunk],
        config_overrides=overrides,
        use_gloo_process_groups=False,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    return config, chunk, optimizer


def _steps(chunk: Any, optimizer: Any, first: int, last: int) -> list[float | None]:
    rank = torch.distributed.get_rank()
    batches = [[synthetic_batch(10 * rank + step)] for step in range(first, last)]
    return [train_step([chunk], optimizer, batch) for batch in batches]


@on_ranks(2)
def test_provides_what_the_factory_builds_and_resumes_it(tmp_path):
    initialize_megatron()
    config, chunk, optimizer = _as_the_bridge_sets_up()
    assert isinstance(optimizer, ChainedOptimizer)
    assert optimizer.config is config
    plain = EmergingOptimizerConfig(**USERS, bf16=True, overlap_param_gather=True)
    other_chunk = _wrapped(plain, torch.bfloat16)
    other = get_megatron_optimizer(plain, [other_chunk], use_gloo_process_groups=False)
    for held in (optimizer, other):
        scheduler_of(held).step(2)
    assert _steps(chunk, optimizer, 0, 2) == _steps(other_chunk, other, 0, 2)

    optimizer.prepare_model_params_for_param_sync()
    chunk.disable_forward_pre_hook(param_sync=True)
    dist_checkpointing.save(_sharded(chunk, optimizer, False), tmp_path)
    chunk.enable_forward_pre_hook()
    went_on = _steps(other_chunk, other, 2, 4)
    assert _steps(chunk, optimizer, 2, 4) == went_on

    _, fresh, resumed = _as_the_bridge_sets_up()
    scheduler_of(resumed).step(2)
    for param in fresh.parameters():
        param.data.zero_()
    loaded = dist_checkpointing.load(_sharded(fresh, resumed, True), tmp_path)
    fresh.load_state_dict(loaded["model"], strict=False)
    resumed.load_state_dict(loaded["optimizer"])
    assert _steps(fresh, resumed, 2, 4) == went_on


@on_ranks(1)
def test_one_chunk_without_a_list_and_overrides_that_may_be_none():
    initialize_megatron()
    config = BridgeOptimizerConfig(**USERS)
    config.finalize()
    chunk = _wrapped(config, torch.float32)
    optimizer = config.provide(
        model_chunks=chunk,
        config_overrides={ParamKey(name="*"): {"max_lr": 0.5}},
        use_gloo_process_groups=False,
        pg_collection=None,
    )
    assert {group["max_lr"] for group in optimizer.param_groups} == {0.5}
    standard = config.provide(model_chunks=chunk, config_overrides=None)
    # None means megatron-core's overrides: no weight decay of biases
    assert {group["wd_mult"] for group in standard.param_groups} == {0.0, 1.0}


def _sharded(chunk: Any, optimizer: Any, is_loading: bool) -> dict[str, Any]:
    """As the Bridge builds a state dict, with its metadata."""
    metadata = {
        "distrib_optim_sharding_type": "dp_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": ProcessGroupCollection.use_mpu_process_groups().dp_cp,
    }
    state: dict[str, Any] = {"iteration": 3}
    state["model"] = chunk.sharded_state_dict(metadata=metadata)
    kwargs = {"is_loading": True} if is_loading else {}
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata, **kwargs)
    return state


def test_layer_wise_storage_tells_the_bridge_how_to_wrap_the_model():
    for fields in ({"use_layer_wise_distributed_optimizer": True}, {}):
        config = BridgeOptimizerConfig(optimizer="muon", lr=0.01, **fields)
        config.finalize()
        assert config.use_distributed_optimizer == bool(fields)


@dataclasses.dataclass(kw_only=True)
class Container(ConfigContainerBase):
    """The trainers' own serialization, which the Bridge's container inherits."""

    optimizer: MegatronConfig


def test_a_run_config_file_brings_it_back(tmp_path):
    config = BridgeOptimizerConfig(**USERS, muon_tp_mode="exchange")
    config.finalize()
    path = tmp_path / "run_config.yaml"
    Container(optimizer=config).to_yaml(str(path))
    back = instantiate(yaml.safe_load(path.read_text())["optimizer"])
    assert type(back) is BridgeOptimizerConfig
    back.finalize()
    # compared as they are written, since the file makes lists of tuples
    assert Container(optimizer=back).to_dict() == Container(optimizer=config).to_dict()


@dataclasses.dataclass
class Recipe(MegatronConfig):
    """As the Bridge's class: no checks when it is made, and it may have fields of its own."""

    of_the_bridge: int = 1

    def __post_init__(self) -> None:
        pass


def test_a_recipes_settings_are_kept(caplog):
    """Those of DeepSeek-V4's recipe: without them its update has 320 times the length."""
    recipe = Recipe(
        optimizer="dist_muon",
        lr=1e-3,
        adam_beta2=0.95,
        muon_scale_mode="unit_rms_norm",
        muon_extra_scale_factor=0.2,
        muon_coefficient_type="deepseekv4",
        muon_num_ns_steps=10,
    )
    config = BridgeOptimizerConfig.from_recipe(recipe, optimizer="muon", min_lr=1e-4)
    kept = ("lr", "adam_beta2", "muon_scale_mode", "muon_extra_scale_factor", "muon_num_ns_steps")
    for name in (*kept, "muon_coefficient_type"):
        assert getattr(config, name) == getattr(recipe, name)
    assert (config.optimizer, config.min_lr, config.muon_tp_mode) == ("muon", 1e-4, "auto")
    config.finalize()
    assert not caplog.records
    recipe.of_the_bridge = 2
    BridgeOptimizerConfig.from_recipe(recipe)
    assert "Recipe has these settings" in caplog.text
    assert "of_the_bridge" in caplog.text
    exact = EmergingOptimizerConfig(optimizer="muon", muon_tp_mode="blockwise")
    assert BridgeOptimizerConfig.from_recipe(exact).muon_tp_mode == "blockwise"
    with pytest.raises(ConfigurationTypeError, match="must be an OptimizerConfig"):
        BridgeOptimizerConfig.from_recipe({"lr": 1})
