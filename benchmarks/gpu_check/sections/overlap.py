"""Compare steps beside the backward pass with serial ones, to the bit, and time both."""

import os
import statistics
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from benchmarks.gpu_check.context import Context, Outcome
from benchmarks.gpu_check.models import LARGE, batch_of, gpt, settings, with_rates
from benchmarks.gpu_check.ranks import CONNECTIONS, COUNTS
from benchmarks.rounds import milliseconds
from megatron_eopt import EmergingOptimizerConfig, get_megatron_optimizer
from tests.harness.megatron import initialize_megatron
from tests.harness.models import forward_backward, wrap_ddp

SMALL: dict[str, Any] = {"hidden": 32, "heads": 4, "query_groups": 2, "layers": 2}
STEPS, SMALL_STEPS = 12, 3
BUCKET, SMALL_BUCKET = 25_000_000, 3_000
"""Elements of a bucket, of which every model has several."""


def run(context: Context) -> Outcome:
    """Train with and without overlap; the weights must have equal bits."""
    outcome, told = context.outcome, []
    sizes = (SMALL, SMALL_STEPS, SMALL_BUCKET) if context.small else (LARGE, STEPS, BUCKET)
    # a second process per count is only worth its time where there are connections
    for count in COUNTS if context.device == "cuda" else COUNTS[:1]:
        with outcome.noting(f"{count} connections"):
            with patch.dict(os.environ, {CONNECTIONS: count}):
                found = context.on_ranks(context.ranks, both_ways, *sizes)
            serial, ahead = (
                max(statistics.median(rank[way]) for rank in found) for way in ("serial", "ahead")
            )
            outcome.figures[count] = {"serial": serial, "ahead": ahead}
            told.append(f"{ahead:.3g} ms of {serial:.3g} with {count} connections")
            differing = sorted({name for rank in found for name in rank["differing"]})
            outcome.problems += [f"{count} connections: {name} differs" for name in differing]
    outcome.headline = f"a training step takes {', '.join(told)}"
    return outcome


def both_ways(model: dict[str, Any], steps: int, bucket: int) -> dict[str, Any]:
    """Return this rank's milliseconds per training step each way, and weights that differ."""
    initialize_megatron()
    ways = ("serial", "ahead")
    found = {way: trained(model, steps, bucket, overlaps=way == "ahead") for way in ways}
    pairs = zip(found["serial"][1].items(), found["ahead"][1].values(), strict=True)
    differing = [name for (name, one), other in pairs if not torch.equal(one, other)]
    return {way: times for way, (times, _) in found.items()} | {"differing": differing}


def trained(
    model: dict[str, Any], steps: int, bucket: int, *, overlaps: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the milliseconds of each training step but the first two, and the weights."""
    model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234)
    flags = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    chunk = wrap_ddp(gpt(model), use_distributed_optimizer=True, bucket_size=bucket, **flags)
    fields = {"use_distributed_optimizer": True, "muon_overlap_dp_comm": overlaps, "clip_grad": 1e3}
    made = EmergingOptimizerConfig(**settings(model, optimizer="muon", **fields))
    optimizer = with_rates(get_megatron_optimizer(made, [chunk]))

    def train(step: int) -> None:
        optimizer.zero_grad()
        chunk.zero_grad_buffer()
        forward_backward([chunk], [batch_of(step)])
        optimizer.step()

    times = [milliseconds(lambda step=step: train(step)) for step in range(steps)]
    optimizer.gather_params(now=True)
    chunk.disable_forward_pre_hook()
    return times[2:], {name: p.detach().cpu().clone() for name, p in chunk.named_parameters()}
