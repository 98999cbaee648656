"""Spot checks of sharded models in your own loop: flipped bits do not get into the weights."""

from contextlib import suppress

import pytest
import torch

from megatron_eopt.base.errors import SpotCheckError
from megatron_eopt.fsdp2 import build_optimizer
from tests.harness import run_ranks
from tests.harness.flips import KINDS, PLACES, Flip, flipping
from tests.harness.tiers import mostly_long
from tests.unit.fsdp2.model import config, eager, far, make_model, set_gradients, weights

CELLS = {"fsdp": 4, "optim_grads_params": 3, "hsdp": 4, "tp": 4, "one unit": 3}


@eager
def train(layout, flips, fraction=1.0):
    """Do one step for each flip, again if it stops; return the weights, and how many were done."""
    model = make_model(layout)
    optimizer = build_optimizer(model, config(muon_check_fraction=fraction))
    done = 0
    for step, flip in enumerate(flips):
        set_gradients(model, step)
        with flipping(flip) as flipped, suppress(SpotCheckError):
            optimizer.step()
        if optimizer.steps == step:
            optimizer.step()  # it was stopped
        done += bool(flipped)
    return weights(model), done


def both(layout, flips):
    return train(layout, flips), train(layout, [None] * len(flips))


@pytest.mark.parametrize("layout", mostly_long(CELLS, "fsdp", "hsdp"))
def test_a_flipped_bit_does_not_get_into_the_weights(layout):
    ranks = CELLS[layout]
    kinds = enumerate((place, kind) for place in PLACES for kind in KINDS)
    flips = [Flip(place, kind, n % ranks, n % 2, n) for n, (place, kind) in kinds]
    results = run_ranks(ranks, both, layout, flips)
    assert sum(done for (_, done), _ in results) > len(flips) / 2
    for (ours, _), (clean, _) in results:
        assert all(torch.equal(ours[name], clean[name]) for name in clean)


def fractions(layout, steps):
    return [train(layout, [None] * steps, fraction)[0] for fraction in (0.0, 0.3)]


def test_checks_change_nothing_but_the_last_bits():
    # matrices that are computed alone, and not in a stack, may round otherwise
    for off, on in run_ranks(4, fractions, "fsdp", 4):
        assert far(off, on)[0] < 1e-6
