"""One step of Muon through real Megatron (model, DDP, schedule, factory) against float64."""

import numpy as np
import pytest
from megatron.core.optimizer import OptimizerConfig

from megatron_eopt import get_megatron_optimizer
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import forward_backward, synthetic_batch, tiny_gpt, wrap_ddp
from tests.reference.muon import muon_step

LR, MOMENTUM, WEIGHT_DECAY = 0.02, 0.95, 0.1


def one_step(rank_batches: int) -> dict[str, tuple[np.ndarray, ...]]:
    """Return (weight, gradient, new weight) of every matrix that Muon stepped."""
    initialize_megatron()
    model = wrap_ddp(tiny_gpt(query_groups=2, gated=True))
    config = OptimizerConfig(
        optimizer="muon",
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        clip_grad=0.0,
        muon_momentum=MOMENTUM,
        muon_nesterov=True,
        muon_split_qkv=False,
        muon_fp32_matmul_prec="highest",
    )
    optimizer = get_megatron_optimizer(config, [model])
    before = {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}
    forward_backward([model], [synthetic_batch(seed) for seed in range(rank_batches)])
    grads = {name: p.main_grad.double().numpy().copy() for name, p in model.named_parameters()}
    optimizer.step()
    return {
        name: (before[name], grads[name], p.detach().double().numpy())
        for name, p in model.named_parameters()
        if p.dim() == 2 and "layers." in name
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_step_equals_the_float64_reference(ranks):
    for matrices in run_ranks(ranks, one_step, 2):
        assert len(matrices) == 8
        for name, (weight, grad, after) in matrices.items():
            expected, _ = muon_step(
                weight,
                grad,
                np.zeros_like(grad),
                lr=LR,
                momentum=MOMENTUM,
                weight_decay=WEIGHT_DECAY,
            )
            # Relative to the step taken. Five float32 iterations amplify rounding errors by the
            # slope at zero, up to 1e3 for the smallest singular values: 1e-5 leaves a margin of 3.
            error = np.linalg.norm(after - expected) / np.linalg.norm(expected - weight)
            assert error < 1e-5, name
