"""Parameters that the model saves in pieces, by other names than their own, or twice."""

import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader

from megatron_eopt import EmergingOptimizerConfig, checkpoints, get_megatron_optimizer
from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.checkpoint.catalogue import Catalogue, Saved
from megatron_eopt.checkpoint.matching import _refuse_other_model
from megatron_eopt.checkpoint.parameter_space import parameter_spaces
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.harness.models import wrap_ddp
from tests.unit.routing import modules

METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


class Attention(nn.Module):
    """Attention whose down projections are one weight and are saved as the two that they were."""

    def __init__(self) -> None:
        super().__init__()
        self.config = modules.mla_config(mla_down_proj_fusion=True)
        self.attention = modules.mla(self.config, fused=True)

    def sharded_state_dict(self) -> Any:
        return self.attention.sharded_state_dict(prefix="attention.", metadata=METADATA)


def numbers(name: str, param: Tensor, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(param.shape, generator=generator)


class Training:
    """A model that goes the same way with any number of ranks."""

    def __init__(self, storage: bool, optimizer: str) -> None:
        modules.set_up(1)
        self.model = Attention()
        for name, param in self.model.named_parameters():
            param.data.copy_(numbers(name, param, 0) / 10)
        self.chunk = wrap_ddp(self.model, use_distributed_optimizer=storage)
        config = EmergingOptimizerConfig(
            optimizer=optimizer,
            lr=0.01,
            clip_grad=0.0,
            use_distributed_optimizer=storage,
            muon_fp32_matmul_prec="highest",
        )
        self.optimizer = get_megatron_optimizer(config, [self.chunk])

    def step(self, step: int) -> None:
        self.chunk.zero_grad_buffer()
        for name, param in self.model.named_parameters():
            param.main_grad.copy_(numbers(name, param, step))
        self.optimizer.step()

    def state(self, *, is_loading: bool) -> dict[str, Any]:
        model = self.model.sharded_state_dict()
        state = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=METADATA)
        return {"optimizer": state}

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}


def save(folder: str, storage: bool, optimizer: str) -> tuple[dict[str, Tensor], list[str]]:
    training = Training(storage, optimizer)
    training.step(1)
    state = training.state(is_loading=False)
    Path(folder).mkdir(exist_ok=True)
    dist_checkpointing.save(state, folder)
    keys = list(FileSystemReader(folder).read_metadata().state_dict_metadata)
    training.step(2)
    training.step(3)
    return training.weights, keys


def resume(folder: str, storage: bool, optimizer: str) -> dict[str, Tensor]:
    first = Training(storage, optimizer)
    first.step(1)
    weights = first.weights
    forget_megatron()
    training = Training(storage, optimizer)
    for name, param in training.model.named_parameters():
        param.data.copy_(weights[name])
    state = checkpoints.load(training.state(is_loading=True), folder)
    training.optimizer.load_state_dict(state["optimizer"])
    training.step(2)
    training.step(3)
    return training.weights


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adam", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "storage", [True, pytest.param(False, marks=pytest.mark.long)], ids=["sharded", "plain"]
)
def test_it_is_saved_and_loaded_at_any_layout(tmp_path, storage, optimizer):
    expected, keys = run_ranks(2, save, str(tmp_path), storage, optimizer)[0]
    kind = "momentum_buffer" if optimizer == "muon" else "exp_avg"
    for part in ("q", "kv"):
        assert f"optimizer.state.{kind}.attention.linear_{part}_down_proj.weight" in keys
    for ranks, other in ((1, True), (2, False)):
        resumed = run_ranks(ranks, resume, str(tmp_path), other, optimizer)[0]
        for name, weight in expected.items():
            torch.testing.assert_close(resumed[name], weight, rtol=0, atol=1e-6)


def test_tied_weights_have_the_name_that_megatron_core_gives_their_state():
    tied, other = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(2))
    entries = {"embedding": tied, "norm": other, "output": tied}
    state = {key: ShardedTensor.from_rank_offsets(key, data) for key, data in entries.items()}
    spaces = parameter_spaces(state, [tied, other])
    by_number = get_param_id_to_sharded_param_map(state, [tied, other])
    assert [spaces[tied].key, spaces[other].key] == [entry.key for entry in by_number.values()]


def test_a_weight_that_is_saved_transposed_or_in_part_or_not_at_all_is_refused():
    weight = nn.Parameter(torch.ones(4, 2))
    for saved in (weight.T, weight[:2], None):
        state = {} if saved is None else {"w": ShardedTensor.from_rank_offsets("w", saved)}
        words = "is not in the model's" if saved is None else "views of the parameter, in order"
        with pytest.raises(ConfigurationError, match=words):
            parameter_spaces(state, [weight])


def test_sizes_that_a_checkpoint_does_not_tell_are_not_compared():
    key = "decoder.layers.mlp.linear_fc2.weight"
    of_model = ShardedTensor.from_rank_offsets(key, torch.ones(4, 2), (0, 0, 2))
    _refuse_other_model({key: of_model}, Catalogue("torch_dist", {}))
    saved = Catalogue("torch_dist", {key: Saved(None, key, shape=(8, 2), cuts=(1, 1))})
    with pytest.raises(CheckpointError, match=r"over 1 ranks .* this run has 2 and 1"):
        _refuse_other_model({key: of_model}, saved)


@pytest.mark.parametrize("allowed", [True, False])
def test_a_model_of_another_shape_is_refused_unless_its_rows_may_differ(allowed):
    item = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), allow_shape_mismatch=allowed)
    catalogue = Catalogue("torch_dist", {"w": Saved(None, "w", shape=(6, 2))})
    told = pytest.raises(CheckpointError, match=r"has shape \(6, 2\) there, and \(4, 2\) in this")
    with nullcontext() if allowed else told:
        _refuse_other_model({"model": item}, catalogue)
