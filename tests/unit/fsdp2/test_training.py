"""Real forward and backward passes, with the gradients clipped."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from megatron_eopt.megatron_fsdp import build_optimizer
from tests.harness import run_ranks
from tests.harness.tiers import mostly_long
from tests.unit.fsdp2.models import config, cut, is_in_units, is_managed, named


class Network(nn.Module):
    """Predicts the class of a word."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(19, 10)
        self.hidden = nn.Linear(10, 14)
        self.mixed = nn.Linear(14, 10, bias=False)
        self.lm_head = nn.Linear(10, 19, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, words):
        hidden = torch.relu(self.hidden(self.embedding(words)))
        return self.lm_head(self.mixed(hidden))


def trained(layout="plain", *, tied=True, passed=False, **options):
    """Return loss and norm of each step; a pass may leave the root whole before."""
    alone = layout == "plain"
    network = cut(Network(tied=tied), layout, "hidden", **options)
    rank, world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    if passed:
        with torch.no_grad():
            network(torch.arange(4))
    optimizer = build_optimizer(network, config())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == (4 if tied else 5)
    found = []
    for step in range(8):
        words = torch.arange(16) % 19 + step % 3
        mine = words.chunk(world)[rank]
        loss = nn.functional.cross_entropy(network(mine).float(), (mine * 5) % 19)
        optimizer.zero_grad()
        loss.backward()
        if is_managed(layout):
            norm = optimizer.clip_grad_norm(0.2)
        else:
            norm = nn.utils.clip_grad_norm_(named(network).values(), 0.2)
            norm = getattr(norm, "full_tensor", lambda norm=norm: norm)()
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return torch.tensor(found)


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WAITING = {"sync_model_each_microbatch": False, "overlap_grad_reduce": False}
CASES = [
    ("fsdp", {}, 1e-4),
    ("fsdp", {"passed": True}, 1e-4),
    ("fsdp", {"mp_policy": MIXED}, 0.1),
    ("optim", {}, 1e-4),
    ("optim", WAITING, 1e-4),
    ("optim_grads", {}, 1e-4),
    ("optim_grads_params", {}, 1e-4),
    ("no_shard", {}, 1e-4),
    ("one unit", {}, 1e-4),
    ("units", {}, 1e-4),
]


USUAL = [CASES[0], CASES[4], CASES[6], CASES[9]]


@pytest.mark.parametrize(("layout", "options", "tolerance"), mostly_long(CASES, *USUAL))
def test_training_sharded_is_training_unsharded(layout, options, tolerance):
    managed = is_managed(layout) or is_in_units(layout)
    options = {**options, "tied": not managed}
    alone = trained(tied=not managed)
    assert alone[-1, 0] < 0.9 * alone[0, 0]
    assert alone[:, 1].min() > 0.2
    # the ranks' means are averaged in another order than one process sums
    job = partial(trained, layout, **options)
    together = torch.stack(run_ranks(2, job, cpu=managed)).mean(0)
    torch.testing.assert_close(together, alone, rtol=tolerance, atol=0)
