"""What the second version of Megatron-FSDP does besides cutting: experts, number types, hooks."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed.fsdp.src.megatron_fsdp import experimental
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
    preprocess_state_dict_for_uneven_dtensor,
)
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as dicts
from torch.distributed.device_mesh import init_device_mesh

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.contrib import megatron_fsdp_v2 as _v2  # noqa: F401  registers itself
from megatron_eopt.matrices import qkv
from megatron_eopt.megatron_fsdp import build_optimizer
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.tiers import mostly_long
from tests.unit.fsdp2.models import FLAT, Model, config, cut, eager, far, named, stepped, weights
from tests.unit.fsdp2.test_training import Network

EXPERTS = 4


class Block(nn.Module):
    """Attention's input, and the experts that a rank has, by their numbers in the whole model."""

    def __init__(self, experts):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.Linear(12, 20)
        self.attention.weight.eopt_split = qkv((20, 12), [12, 4, 4])
        whole = {str(number): nn.Linear(12, 9, bias=False) for number in range(EXPERTS)}
        self.experts = nn.ModuleDict({str(number): whole[str(number)] for number in experts})


def with_experts(ranks_of_experts):
    """Return the model, its experts distributed over some ranks and cut over the others."""
    if not dist.is_initialized():
        return Block(range(EXPERTS))
    shape = (dist.get_world_size() // ranks_of_experts, ranks_of_experts)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("expert_dp", "ep"))
    first = mesh.get_local_rank("ep") * (each := EXPERTS // ranks_of_experts)
    model = Block(range(first, first + each))
    flat = [experimental.Flat()]
    cut_experts = experimental.Placements(["expert_dp"], flat, flat, flat)
    experimental.fully_shard(model.experts, mesh["expert_dp"], cut_experts)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    experimental.fully_shard(model, mesh, experimental.Placements(["dp"], flat, flat, flat))
    return model


@eager
def train_experts(ranks_of_experts=EXPERTS, save="", load=""):
    """Do four steps, saved after three, or continue with the fourth from what was saved."""
    found = {}
    for name in ("muon", "soap", "adam"):
        model = with_experts(ranks_of_experts)
        optimizer = build_optimizer(model, config(name))
        if not load:
            stepped(model, optimizer, 0, 1, 2)
        # flattened, since lists of names would differ between expert-parallel ranks
        state = {
            "model": preprocess_state_dict_for_uneven_dtensor(dicts.get_model_state_dict(model)),
            "optimizer": dicts.get_optimizer_state_dict(model, optimizer, options=FLAT),
        }
        if save:
            checkpoint.save(state, checkpoint_id=f"{save}/{name}")
        if load:
            checkpoint.load(state, checkpoint_id=f"{load}/{name}")
            dicts.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)
        found[name] = stepped(model, optimizer, 3)
    return found


def test_experts_are_cut_over_other_ranks_than_the_rest(tmp_path):
    alone = train_experts()
    saved = run_ranks(4, train_experts, 2, str(tmp_path), timeout=120)
    loaded = run_ranks(2, train_experts, 1, "", str(tmp_path), timeout=120)
    for results in saved + loaded:
        for name, after in results.items():
            assert far(after, {key: alone[name][key] for key in after})[0] < 2e-6, name
    # each rank of four has half of the experts
    assert [len(results["muon"]) for results in saved + loaded] == [4, 4, 4, 4, 6, 6]


def computes_with_main_weights(model):
    """Whether the weights that the model computes with are the rounded main weights."""
    units = {param._mfsdp_parameter_group for param in model.parameters()}
    buffers = [(unit.main_weight.local_buffer, unit.model_weight.local_buffer) for unit in units]
    same = partial(torch.allclose, rtol=0, atol=0, equal_nan=True)
    # nobody writes what pads a buffer, so it may be nan
    return all(same(main.bfloat16(), compute) for main, compute in buffers)


def train_in_bf16(layout, name, hooked):
    """Return the mean loss of each step, of two microbatches, and the weights."""
    model = cut(Network(tied=False).bfloat16(), layout, "hidden")
    optimizer = build_optimizer(model, config(name))
    if hooked:
        experimental.fully_shard_optimizer(optimizer)
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        words = (torch.arange(16) % 19 + step % 3).chunk(4)
        for batch in range(2):
            mine = words[2 * batch + dist.get_rank()]
            with experimental.microbatch(model, is_last=batch == 1):
                logits = model(mine).float()
                loss = nn.functional.cross_entropy(logits, (mine * 5) % 19)
                (loss / 2).backward()
            losses.append(loss.item() / 2)
        assert {param.grad.dtype for param in model.parameters()} == {torch.bfloat16}
        optimizer.step()
        assert computes_with_main_weights(model)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    assert not computes_with_main_weights(model)
    optimizer.load_state_dict(optimizer.state_dict())
    assert computes_with_main_weights(model)
    return torch.tensor(losses), weights(model)


def in_bf16(layout):
    return {
        name: [train_in_bf16(layout, name, hooked) for hooked in (False, True)]
        for name in ("muon", "soap")
    }


def in_float32():
    """Train with the same words in one process; return the mean loss of each step."""
    model, losses = Network(tied=False), []
    optimizer = build_optimizer(model, config("muon"))
    for step in range(6):
        words = torch.arange(16) % 19 + step % 3
        loss = nn.functional.cross_entropy(model(words), (words * 5) % 19)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


@pytest.mark.parametrize("layout", mostly_long(["units", "units x 2"], "units"))
def test_gradients_of_16_bits_and_weights_to_compute_with(layout):
    results = run_ranks(2, in_bf16, layout, timeout=120)
    for name in results[0]:
        for (losses, plain), (hooked_losses, hooked) in (result[name] for result in results):
            # what upstream's hooks do is done already
            assert torch.equal(losses, hooked_losses)
            assert far(plain, hooked)[0] == 0
    losses = sum(result["muon"][0][0] for result in results).view(6, 2).sum(1) / 2
    torch.testing.assert_close(losses, in_float32(), rtol=0.1, atol=0)


@pytest.mark.parametrize(
    ("layout", "how", "message"),
    [
        ("one unit", "tied", r"which have none: lm_head\.weight"),
        ("one unit", "unused", r"which have none: unused\.weight"),
        ("units", "frozen", "was set after fully_shard"),
    ],
)
@on_ranks(2, timeout=120)
@eager
def test_units_that_would_not_be_trained_as_told_are_refused(layout, how, message):
    model = Network(tied=how == "tied")
    if how == "unused":
        model.unused = nn.Linear(3, 2, bias=False)
    model = cut(model, layout, "hidden")
    optimizer = build_optimizer(model, config("muon"))
    next(model.parameters()).requires_grad_(how != "frozen")
    model(torch.arange(4)).sum().backward()
    with pytest.raises(ConfigurationError, match=message):
        optimizer.step()


@pytest.mark.parametrize("layout", ["fsdp", "units"])
@on_ranks(2, timeout=120)
@eager
def test_what_is_set_on_a_cut_weight_counts(layout):
    """Of two weights that were kept from Muon before they were cut, one is stepped by it."""
    model = Model()
    names = ("down.weight", "wide.weight")
    for name in names:
        model.get_parameter(name).use_muon = False
    model = cut(model, layout, "up")
    named(model)["down.weight"].use_muon = True
    optimizer = build_optimizer(model, config("muon"))
    stepped(model, optimizer, 0)
    found = [name for name in names if "momentum_buffer" in optimizer.state[named(model)[name]]]
    assert found == ["down.weight"], found
