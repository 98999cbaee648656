"""``build_optimizer`` for plain models that Megatron-FSDP's ``fully_shard_model`` has sharded."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed.fsdp.src.megatron_fsdp import fully_shard_model
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
    uneven_dtensor_to_full_tensor,
)
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_eopt import ConfigurationError
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.matrices import gated
from tests.harness import run_ranks
from tests.unit.fsdp2.model import STEPS, Model, config, eager, far, gradient, trained

OPTIMIZERS = {
    "muon": config(),
    "normuon": config("adaptive_muon", adaptive_muon_moment2_method="normuon"),
    "soap": config("soap"),
    "adam": config("adam"),
}
# owners may batch other matrices together, and batches may round differently
TOLERANCE = 1e-6


def sharded(model: nn.Module, strategy: str, *, replicas: int = 1, **options: bool) -> Any:
    shards = dist.get_world_size() // replicas
    names = ("outer", "fsdp", "tp")
    mesh = init_device_mesh("cpu", (replicas, shards, 1), mesh_dim_names=names)
    hybrid = {}
    if replicas > 1:
        both = mesh["outer", "fsdp"]._flatten("both")
        hybrid = {"dp_outer_dim": "outer", "hybrid_fsdp_group": both.get_group()}
    return fully_shard_model(
        model,
        device_mesh=mesh,
        dp_shard_dim="fsdp",
        tp_dim="tp",
        fsdp_unit_modules=[nn.Linear],
        zero_dp_strategy=strategy,
        **hybrid,
        **options,
    )


def make_model(strategy: str, replicas: int) -> Any:
    model = sharded(Model(), strategy, replicas=replicas)
    model.module.up.weight.eopt_split = gated((16, 12))
    return model


def set_gradients(model: Any, step: int) -> None:
    model._replace_param_with_distributed_if_needed()
    for name, param in model.module.named_parameters():
        local = param.to_local()
        part = gradient(name, param.shape, step).view(-1)[param.megatron_fsdp_slice]
        param.grad = None
        if local.numel():
            layout = {"shape": param.shape, "stride": param.stride(), "run_check": False}
            part = part.view(local.shape).clone()
            param.grad = DTensor.from_local(part, param.device_mesh, param.placements, **layout)


@torch.no_grad()
def weights(model: Any) -> dict[str, torch.Tensor]:
    return {n: uneven_dtensor_to_full_tensor(p).clone() for n, p in model.module.named_parameters()}


@eager
def train_all(cells: list[tuple[str, int, str]]) -> list[dict[str, torch.Tensor]]:
    results = []
    for strategy, replicas, optimizer in cells:
        model = make_model(strategy, replicas)
        stepping = build_optimizer(model, OPTIMIZERS[optimizer])
        for step in range(STEPS):
            set_gradients(model, step)
            stepping.step()
        results.append(weights(model))
    return results


CELLS = {
    2: [
        ("optim", 1, "muon"),
        ("optim_grads", 1, "muon"),
        *(("optim_grads_params", 1, name) for name in OPTIMIZERS),
    ],
    4: [("optim_grads_params", 1, "muon"), ("optim_grads_params", 2, "muon")],
}


@pytest.mark.parametrize("world", CELLS)
def test_shards_equal_one_process(world):
    expected = {name: trained("plain", settings) for name, settings in OPTIMIZERS.items()}
    for results in run_ranks(world, train_all, CELLS[world], timeout=280):
        for cell, result in zip(CELLS[world], results, strict=True):
            assert far(result, expected[cell[2]])[0] < TOLERANCE, cell


class Network(nn.Module):
    """Predicts the class of a word."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(19, 10)
        self.hidden = nn.Linear(10, 14)
        self.mixed = nn.Linear(14, 10, bias=False)
        self.lm_head = nn.Linear(10, 19, bias=False)

    def forward(self, words):
        hidden = torch.relu(self.hidden(self.embedding(words)))
        return self.lm_head(self.mixed(hidden))


def stepped(model: nn.Module, optimizer: Any, first: int, end: int) -> list[float]:
    found = []
    for step in range(first, end):
        # the same on all ranks, so that a mean of gradients is each one's
        words = torch.arange(16) % 19 + step % 3
        loss = nn.functional.cross_entropy(model(words), (words * 5) % 19)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def losses(strategy: str) -> list[float]:
    model = sharded(Network(), strategy)
    return stepped(model, build_optimizer(model, config()), 0, 6)


def alone() -> list[float]:
    model = Network()
    return stepped(model, build_optimizer(model, config()), 0, 6)


def test_training_sharded_is_training_unsharded():
    expected = alone()
    assert expected[-1] < 0.9 * expected[0]
    for strategy in ("optim", "optim_grads", "optim_grads_params"):
        for found in run_ranks(2, losses, strategy):
            assert found == pytest.approx(expected, rel=1e-6), strategy


def clipped(strategy: str = "", options: Any = ()) -> list[float]:
    """Return the norms of gradients that are clipped, of other words on each rank."""
    model, rank, world = Network(), 0, 1
    if strategy:
        model = sharded(model, strategy, **dict(options))
        rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = build_optimizer(model, config("sgd", lr=1.0))
    found = []
    for step in range(4):
        words = (torch.arange(16) % (7 + step)).chunk(world)[rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(words), (words * 5) % 19).backward()
        if strategy:
            norm = optimizer.clip_grad_norm(0.2)
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        found.append(norm.item())
        optimizer.step()
    return found


def test_gradients_are_clipped_by_their_common_norm():
    expected = clipped()
    assert min(expected) > 0.2
    waiting = {"sync_model_each_microbatch": False, "overlap_grad_reduce": False}
    tried = [(name, {}) for name in ("optim_grads_params", "optim", "no_shard")]
    for strategy, options in (*tried, ("optim", waiting)):
        for found in run_ranks(2, clipped, strategy, options):
            assert found == pytest.approx(expected, rel=1e-5), (strategy, options)


def saved(folder: str) -> list[float]:
    model = sharded(Network(), "optim_grads_params")
    optimizer = build_optimizer(model, config())
    stepped(model, optimizer, 0, 3)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    checkpoint.save(state, checkpoint_id=folder)
    return stepped(model, optimizer, 3, 6)


def resumed(folder: str, strategy: str) -> list[float]:
    """Load into a model that has taken other steps."""
    model = sharded(Network(), strategy)
    optimizer = build_optimizer(model, config())
    stepped(model, optimizer, 7, 9)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    checkpoint.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return stepped(model, optimizer, 3, 6)


def test_a_saved_run_goes_on_in_another_strategy(tmp_path):
    folder = str(tmp_path)
    expected = run_ranks(2, saved, folder)[0]
    for strategy in ("optim_grads_params", "optim"):
        for found in run_ranks(2, resumed, folder, strategy):
            assert found == pytest.approx(expected, rel=1e-6), strategy


def refused() -> str:
    model = sharded(Network(), "optim_grads_params")
    model.ddp_config.fsdp_double_buffer = True
    with pytest.raises(ConfigurationError) as caught:
        build_optimizer(model, config())
    return str(caught.value)


def test_modes_are_refused_as_in_megatrons_trainer():
    assert all("fsdp_double_buffer" in message for message in run_ranks(2, refused))
