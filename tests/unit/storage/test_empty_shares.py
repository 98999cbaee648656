"""A rank whose share holds nothing of an optimizer takes part in its steps, off-loaded or not."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron_eopt.megatron_fsdp import build_optimizer
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.harness.tiers import mostly_long
from tests.unit.fsdp2.models import config, cut, eager, far, stepped, weights
from tests.unit.storage.full_state import OPTIMIZERS, Case, build, differences, full_state, steps
from tests.unit.storage.runs import SHARDED

MODEL = {"layers": 1, "hidden": 32, "heads": 4, "query_groups": 2}


def trained(case, fraction):
    """Return the state after three steps, and which update rules have nothing on this rank."""
    off_load = {"optimizer_cpu_offload": fraction > 0, "optimizer_offload_fraction": fraction}
    case = replace(case, model=MODEL, ddp=SHARDED, config=case.config | off_load)
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 3)
    empty = {
        type(update_rule).__name__
        for link in optimizer.chained_optimizers
        for update_rule in link.update_rules
        if not update_rule.params
    }
    state = full_state(case, chunk, optimizer)
    forget_megatron()
    return state, empty


def at_all_fractions(name):
    optimizer, fields = OPTIMIZERS[name]
    # one matrix alone, so that most ranks hold nothing of the matrix optimizer
    alone = Case("adam", config=fields, overrides={"*.linear_proj.weight": optimizer})
    found = []
    for case in (Case(optimizer, config=fields), alone):
        resident, empty = trained(case, 0.0)
        others = [trained(case, fraction)[0] for fraction in (0.5, 1.0)]
        found.append((empty, [differences(resident, other) for other in others]))
    return found


@pytest.mark.parametrize("name", mostly_long(OPTIMIZERS, "muon"))
def test_steps_off_load_what_ranks_hold_and_no_more(name):
    results = run_ranks(4, at_all_fractions, name, timeout=120)
    for found in results:
        assert [differing for _, differing in found] == [[[], []], [[], []]]
    empty = set().union(*(names for found in results for names, _ in found))
    # both the scalar and the matrix optimizer have nothing somewhere
    assert len(empty) == (1 if name == "lion" else 2)


class Thin(nn.Module):
    """Parameters of one row, of which all but one rank hold nothing."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Linear(8, 1, bias=False)
        self.embedding = nn.Embedding(1, 8)


@eager
def thin(name, layout, fraction=0.0):
    torch.manual_seed(0)
    optimizer, fields = OPTIMIZERS[name]
    off_load = {"optimizer_cpu_offload": fraction > 0, "optimizer_offload_fraction": fraction}
    model = cut(Thin(), layout, "matrix")
    built = build_optimizer(model, config(optimizer, **fields, **off_load))
    stepped(model, built, 0, 1, 2)
    built.load_state_dict(built.state_dict())
    return weights(model)


def thin_by_all():
    return {name: [thin(name, "fsdp", fraction) for fraction in (0.0, 1.0)] for name in OPTIMIZERS}


def test_fully_sharded_parameters_may_be_empty_on_a_rank():
    for found in run_ranks(3, thin_by_all, timeout=120):
        for name, (ours, off_loaded) in found.items():
            assert far(ours, thin(name, "plain"))[0] < 1e-5
            assert far(off_loaded, ours)[0] == 0
