"""Real forward and backward passes through ``fully_shard``."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megatron_eopt.fsdp2 import build_optimizer
from tests.harness import run_ranks
from tests.unit.fsdp2.model import config


class Network(nn.Module):
    """Predicts the class of a word."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(19, 10)
        self.hidden = nn.Linear(10, 14)
        self.mixed = nn.Linear(14, 10, bias=False)
        self.lm_head = nn.Linear(10, 19, bias=False)
        # tied, as in many language models
        self.lm_head.weight = self.embedding.weight

    def forward(self, words):
        hidden = torch.relu(self.hidden(self.embedding(words)))
        return self.lm_head(self.mixed(hidden))


def losses(rank, world, mixed, passed=False):
    network = Network()
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if not passed:
            fully_shard(network.hidden, mesh=mesh, **({"mp_policy": policy} if mixed else {}))
        fully_shard(network, mesh=mesh, **({"mp_policy": policy} if mixed else {}))
    if passed:
        with torch.no_grad():
            network(torch.arange(4))
    optimizer = build_optimizer(network, config())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4
    found = []
    for step in range(8):
        words = torch.arange(16) % 19 + step % 3
        mine = words.chunk(world)[rank]
        loss = nn.functional.cross_entropy(network(mine).float(), (mine * 5) % 19)
        optimizer.zero_grad()
        loss.backward()
        assert all(param.grad.dtype == torch.float32 for param in network.parameters())
        optimizer.step()
        found.append(loss.item())
    return found


def sharded_losses(mixed, passed=False):
    return losses(torch.distributed.get_rank(), torch.distributed.get_world_size(), mixed, passed)


def test_training_sharded_is_training_unsharded():
    alone = losses(0, 1, mixed=False)
    assert alone[-1] < 0.5 * alone[0]
    together = torch.tensor(run_ranks(2, sharded_losses, False, cpu=False)).mean(0)
    # the ranks' means are averaged in another order than one process sums
    assert together.tolist() == pytest.approx(alone, rel=1e-4)


def test_a_root_that_a_pass_has_left_whole_is_trained():
    alone = losses(0, 1, mixed=False)
    together = torch.tensor(run_ranks(2, sharded_losses, False, True, cpu=False)).mean(0)
    assert together.tolist() == pytest.approx(alone, rel=1e-4)


def test_training_with_a_mixed_precision_policy():
    alone = losses(0, 1, mixed=False)
    together = torch.tensor(run_ranks(2, sharded_losses, True, cpu=False)).mean(0)
    assert together.tolist() == pytest.approx(alone, rel=0.1)
