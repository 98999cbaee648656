"""A step that a CUDA graph replays has the bits of a plain one, with new rates and gradients."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper

from megatron_eopt.base.errors import ConfigurationError, NonFiniteError
from tests.harness import run_ranks
from tests.harness.graphs import recorded_graphs
from tests.harness.scene import forget_megatron
from tests.unit.storage.full_state import Case, build, counts_of, full_state
from tests.unit.storage.runs import BF16, DENSE, MOE, NORMUON, REPLICATED, inject

STEPS = 6
CLIPPED = {"clip_grad": 0.3, "muon_fp32_matmul_prec": "medium"}
GRAPH = {"optimizer_cuda_graph": True}


def config(**fields: Any) -> dict[str, Any]:
    return {"config": {**CLIPPED, "fused_adam": True, **fields}}


def replicated(**fields: Any) -> dict[str, Any]:
    merged = {**config(**fields)["config"], **REPLICATED["config"]}
    return {**REPLICATED, "config": merged}


CASES = {
    "Muon, sharded": Case(**config()),
    "Muon, replicated": Case(**replicated()),
    "Muon, sharded, bfloat16": Case(model=BF16["model"], **config()),
    "Muon, replicated, bfloat16": Case(model=BF16["model"], **replicated()),
    "Muon, small waves": Case(**config(matrix_buffer_mb=0.01)),
    "Muon, experts": Case(model=MOE, **config()),
    "Muon, L2": Case(**config(decoupled_weight_decay=False)),
    "Muon, not clipped": Case(**config(clip_grad=0.0)),
    "Muon, int8 momentum": Case(**config(muon_momentum_dtype="int8")),
    "Muon, bf16 momentum": Case(**config(muon_momentum_dtype="bf16")),
    "NorMuon, sharded": Case("adaptive_muon", **config(**NORMUON)),
    "NorMuon, replicated": Case("adaptive_muon", **replicated(**NORMUON)),
    "Adam, sharded": Case("adam", **config()),
    "Adam, replicated": Case("adam", **replicated()),
}


def with_graph(case: Case) -> Case:
    return replace(case, config=case.config | GRAPH)


def set_rates(optimizer: Any, step: int) -> None:
    """Do what a scheduler does before a step."""
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.01 / (1 + step + number)
        group["weight_decay"] = 0.0 if step == 2 else 0.1 * step


def train(case: Case, chunk: Any, optimizer: Any, steps: range) -> list[float]:
    """Return the gradient norm of each step."""
    norms = []
    for step in steps:
        set_rates(optimizer, step)
        optimizer.zero_grad()
        inject(case.run, chunk, step)
        done, norm, zeros = optimizer.step()
        assert done and zeros is None
        norms.append(float(norm))
    return norms


def trained(case: Case) -> Any:
    chunk, optimizer = build(case)
    norms = train(case, chunk, optimizer, range(STEPS))
    return norms, counts_of(chunk, optimizer), full_state(case, chunk, optimizer)


def wrap(optimizer: Any) -> None:
    """Do what megatron-core's trainer does before the first step."""
    optimizer.step = OptimizerCudaGraphWrapper(optimizer.step)


def replayed(case: Case) -> Any:
    """Return the same of a run that captures its second step, and steps by itself at the end."""
    case = with_graph(case)
    chunk, optimizer = build(case)
    with recorded_graphs() as graphs:
        wrap(optimizer)
        norms = train(case, chunk, optimizer, range(2))
        (graph,), buffers = graphs, addresses(optimizer)
        calls = len(graph.calls)
        norms += train(case, chunk, optimizer, range(2, STEPS - 1))
        assert (len(graph.calls), addresses(optimizer)) == (calls, buffers)
        del optimizer.step
    norms += train(case, chunk, optimizer, range(STEPS - 1, STEPS))
    return norms, counts_of(chunk, optimizer), full_state(case, chunk, optimizer)


def addresses(optimizer: Any) -> list[int]:
    rules = (rule for link in optimizer.links for rule in link.update_rules)
    return [tensor.data_ptr() for rule in rules for tensor in rule.buffers()]


def compare(names: list[str]) -> None:
    for name in names:
        forget_megatron()
        plain = trained(CASES[name])
        forget_megatron()
        found = replayed(CASES[name])
        assert found[:2] == plain[:2], name
        differ = [k for k, v in plain[2].items() if not same(v, found[2][k])]
        assert plain[2].keys() == found[2].keys() and not differ, (name, differ)


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    return True


def test_replays_have_the_bits_of_plain_steps():
    run_ranks(1, compare, list(CASES))
