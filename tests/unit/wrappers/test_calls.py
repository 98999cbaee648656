"""Calls as trainers and RL frameworks make them, and what they rely on afterwards."""

import inspect
import warnings
from typing import Any

import pytest
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig

from megatron_eopt import ConfigurationTypeError, checkpoints, get_megatron_optimizer
from megatron_eopt.base.agreement import gather_objects
from megatron_eopt.config.settings import resolve
from megatron_eopt.muon import get_megatron_muon_optimizer
from megatron_eopt.testing.scene import forget_megatron
from megatron_eopt.wrappers.config import as_muon
from tests.harness.each_rank import on_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import synthetic_batch, tiny_gpt, train_step, wrap_ddp
from tests.unit.contracts.callers import scheduler_of

GROUP_KEYS = {
    "params", "is_expert_parallel", "default_config", "wd_mult", "lr_mult", "is_decoupled_lr",
    "max_lr", "min_lr", "lr", "weight_decay",
}  # fmt: skip


def muon_config(**fields: Any) -> OptimizerConfig:
    defaults = {"optimizer": "muon", "lr": 0.01, "min_lr": 0.001, "weight_decay": 0.1}
    return OptimizerConfig(**(defaults | fields))


def model_on_one_rank() -> Any:
    initialize_megatron()
    return wrap_ddp(tiny_gpt(layers=1))


def learns(chunk: Any, optimizer: Any) -> None:
    assert isinstance(optimizer, ChainedOptimizer)
    batch = [synthetic_batch(0)]
    losses = [train_step([chunk], optimizer, batch) for _ in range(4)]
    assert losses[-1] < losses[0]


def _as_the_trainer() -> None:
    chunk = model_on_one_rank()
    config = muon_config()
    overrides = megatron_optimizer.get_standard_config_overrides(config)
    optimizer = get_megatron_optimizer(
        config,
        [chunk],
        config_overrides=overrides,
        use_gloo_process_groups=True,
        dump_param_to_param_group_map=None,
    )
    scheduler_of(optimizer).step(1)
    for group in optimizer.param_groups:
        assert set(group) >= GROUP_KEYS
        assert group["lr"] == 0.005
        assert group["weight_decay"] == pytest.approx(0.1 * group["wd_mult"])
    assert {group["wd_mult"] for group in optimizer.param_groups} == {0.0, 1.0}
    learns(chunk, optimizer)


def _through_the_old_entry_point() -> None:
    chunk = model_on_one_rank()
    with pytest.warns(DeprecationWarning, match="get_megatron_optimizer"):
        optimizer = get_megatron_muon_optimizer(muon_config(optimizer="adam"), [chunk])
    assert optimizer.chained_optimizers[0].update_rules[0].name == "TensorParallelMuon"
    learns(chunk, optimizer)


def test_the_old_entry_point_changes_a_copy():
    for given, layer_wise, used in (("sgd", False, "muon"), ("adaptive_muon", True, None)):
        config = muon_config(optimizer=given)
        made = as_muon(config, layer_wise=layer_wise)
        assert (made.optimizer, config.optimizer) == (used or given, given)
        assert made.use_layer_wise_distributed_optimizer == layer_wise
    with pytest.raises(ConfigurationTypeError, match="must be an OptimizerConfig"):
        get_megatron_muon_optimizer(None, [torch.nn.Linear(2, 2)])


@on_ranks(1)
def test_calls_of_trainers_and_rl_frameworks():
    for call in (_as_the_trainer, _through_the_old_entry_point):
        call()
        forget_megatron()


def test_the_signature_is_megatrons():
    ours = inspect.signature(get_megatron_optimizer).parameters
    theirs = inspect.signature(megatron_optimizer.get_megatron_optimizer).parameters
    assert [(p.name, p.default) for p in ours.values()] == [
        (p.name, p.default) for p in theirs.values()
    ]


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(1)
def test_frozen_models_step_are_saved_and_loaded(dtype, sharded, tmp_path):
    initialize_megatron()
    model = tiny_gpt(layers=1, dtype=dtype).requires_grad_(False)
    chunk = wrap_ddp(model, use_distributed_optimizer=sharded)
    fields = {"bf16": dtype == torch.bfloat16, "params_dtype": dtype}
    config = muon_config(use_distributed_optimizer=sharded, **fields)
    optimizer = get_megatron_optimizer(config, [chunk])
    assert optimizer.is_stub_optimizer or sharded
    assert optimizer.step()[0] is True
    if not sharded:
        optimizer.load_state_dict(optimizer.state_dict())
    weights = chunk.sharded_state_dict()
    checkpoints.save(weights | {"optimizer": optimizer.sharded_state_dict(weights)}, tmp_path)
    with pytest.raises(checkpoints.CheckpointError, match="does not exist"):
        checkpoints.save(weights, tmp_path / "none")
    metadata: dict[str, Any] = {}
    optimizer.sharded_state_dict(weights, metadata=metadata)
    assert metadata == {}
    state = {"optimizer": optimizer.sharded_state_dict(weights, is_loading=True)}
    optimizer.load_state_dict(checkpoints.load(weights | state, tmp_path)["optimizer"])


@on_ranks(2)
def test_a_stage_without_parameters_has_the_same_groups():
    initialize_megatron(pp=2)
    model = tiny_gpt(layers=2)
    first_stage = model.pre_process
    chunk = wrap_ddp(model.requires_grad_(not first_stage))
    optimizer = get_megatron_optimizer(muon_config(clip_grad=1.0), [chunk])
    if not first_stage:
        for param in chunk.parameters():
            param.main_grad.fill_(0.1)
    held = [len(group["params"]) for group in optimizer.param_groups]
    assert any(held) != first_stage
    first, second = gather_objects([group["group_id"] for group in optimizer.param_groups])
    assert first == second
    assert optimizer.step()[0]


@on_ranks(1)
def test_the_map_of_groups_is_written(tmp_path):
    place, chunk = tmp_path / "map", model_on_one_rank()
    get_megatron_optimizer(muon_config(), [chunk], dump_param_to_param_group_map=str(place))
    assert (place / ".metadata").exists()


def test_dist_names_are_deprecated():
    with pytest.warns(DeprecationWarning, match="use_distributed_optimizer=True"):
        meaning = resolve(muon_config(optimizer="dist_soap"))
    assert (meaning.optimizer, meaning.storage) == ("soap", "sharded")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve(muon_config(use_distributed_optimizer=True)).storage == "sharded"
        assert resolve(muon_config(optimizer="adam")).storage == "replicated"
