"""Beside the backward pass and on side streams, steps have the same bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_eopt import EmergingOptimizerConfig, get_megatron_optimizer
from megatron_eopt.math import passes
from megatron_eopt.optimizers import muon_rule
from megatron_eopt.testing.scene import forget_megatron
from tests.harness.each_rank import on_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import forward_backward, synthetic_batch, tiny_gpt, wrap_ddp
from tests.harness.streams import LateStream, late_streams
from tests.harness.tiers import mostly_long
from tests.unit.storage.runs import NORMUON, OVERLAP, SHARDED

LIMITS = (100.0, 100.0, 0.05, 100.0)
"""Of gradient norms in each step, so that some are clipped."""

WORLDS: dict[int, dict[str, int]] = {1: {}, 2: {}, 4: {"tp": 2}}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {},
    "adaptive_muon": {**NORMUON, "muon_scalar_optimizer": "adam"},
}
WAYS: dict[str, dict[str, Any]] = {"overlap": {"muon_overlap_dp_comm": True}, "side streams": {}}
SERVED = {"muon": ("overlap", "side streams"), "adaptive_muon": ("side streams",)}
"""Ways that an optimizer has."""


def streams_of(optimizer: Any) -> list[LateStream]:
    """Give an optimizer late streams where it has side streams on a GPU; return them."""
    made = []
    members = optimizer.chained_optimizers
    rules = [rule for its in members for rule in its.update_rules]
    owners = [its.optimizer for its in members] + [
        getattr(rule, "exchange", rule) for rule in rules
    ]
    sides = (getattr(owner, "_side", None) for owner in owners)
    for owner in filter(None, (*sides, optimizer._overlap)):
        owner._stream = LateStream()
        made.append(owner._stream)
    return made


@contextmanager
def passes_as_operators() -> Iterator[None]:
    """Let a pass be one operator, into which the host does not look, as on a GPU."""

    def run(first: torch.Tensor, module: str, launcher: str, name: str, *numbers: Any) -> None:
        passes.ON_HOST[name](*numbers)

    with (
        mock.patch.object(passes, "_is_served", return_value=True),
        mock.patch.object(passes.KERNELS, "call", run),
        # sums of squares are the kernels' own
        mock.patch.object(muon_rule, "empty_sums", return_value=None),
    ):
        yield


@contextmanager
def stepping(way: str, optimizer: Any) -> Iterator[None]:
    """Let an optimizer step in one way, and check that it does."""
    if way == "plain":
        yield
        return
    streams = streams_of(optimizer)
    with late_streams(), passes_as_operators():
        yield
    assert not any(stream.launched.calls for stream in streams)
    assert max(stream.waits for stream in streams) > 1


def trained(name: str, way: str, parallel: dict[str, int]) -> dict[str, Any]:
    """Return norms, weights and state after steps with changing rates and limits."""
    initialize_megatron(**parallel)
    model = tiny_gpt(layers=2, dtype=torch.bfloat16, bias=False)
    chunk = wrap_ddp(model, **SHARDED | OVERLAP | {"bucket_size": 3000})
    fields = {"lr": 0.01, "bf16": True, "params_dtype": torch.bfloat16, "matrix_buffer_mb": 0.01}
    fields |= SHARDED | OPTIMIZERS[name] | WAYS.get(way, {})
    optimizer = get_megatron_optimizer(EmergingOptimizerConfig(optimizer=name, **fields), [chunk])
    found: dict[str, Any] = {}
    tp = parallel.get("tp", 1)
    size, rank = dist.get_world_size() // tp, dist.get_rank() // tp
    with stepping(way, optimizer):
        for step, limit in enumerate(LIMITS):
            for number, group in enumerate(optimizer.param_groups):
                group["lr"] = 0.01 / (1 + step + number)
                group["weight_decay"] = 0.1 * step
            optimizer.config.clip_grad = limit
            optimizer.zero_grad()
            chunk.zero_grad_buffer()
            forward_backward([chunk], [synthetic_batch(4 * step + i) for i in range(rank, 4, size)])
            done, norm, _ = optimizer.step()
            found[f"norm {step}"] = float(norm)
            assert done
            assert 0.05 < found[f"norm {step}"] < 90
    chunk.disable_forward_pre_hook()
    found |= {name: param.detach().clone() for name, param in chunk.named_parameters()}
    for link in optimizer.chained_optimizers:
        for number, item in enumerate(link.shards):
            kept = link.tensors_of(item).items()
            found |= {f"{link} {number} {kind}": value.clone() for kind, value in kept}
    forget_megatron()
    return found


@pytest.mark.parametrize("world", mostly_long(WORLDS, 2))
@on_ranks("world")
def test_every_way_to_step_has_the_bits_of_plain_steps(world):
    wrong, parallel = [], WORLDS[world]
    for name in OPTIMIZERS:
        expected = trained(name, "plain", parallel)
        for way in SERVED[name]:
            found = trained(name, way, parallel)
            for (what, value), other in zip(expected.items(), found.values(), strict=True):
                same = torch.equal(*map(torch.as_tensor, (value, other)))
                wrong += [] if same else [f"{name}, {way}: {what}"]
    assert not wrong
