"""A parameter without a gradient in one step has one step count, whichever rank is asked."""

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.harness import run_ranks
from tests.unit.fsdp2.model import config, eager, named, set_gradients, train


@eager
def counts(layout, name):
    model, optimizer = train(layout, config(name), steps=2)
    set_gradients(model, 2)
    for param in named(model).values():
        if param.shape == (3, 5) or param.dim() == 1:
            param.grad = None
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer)["state"]
    return {key: int(values["step"]) for key, values in state.items() if "step" in values}


def test_ranks_with_empty_shards_count_as_the_owner_does():
    torch.manual_seed(0)
    first, second = run_ranks(2, counts, "optim_grads_params", "adam", cpu=True, timeout=120)
    assert first == second
    assert set(first.values()) == {2, 3}
