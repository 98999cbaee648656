"""What callers do to an optimizer, or ask of it, either counts or is refused."""

import itertools
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import distributed

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig, get_megatron_optimizer
from megatron_eopt.matrices import gated
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import assert_same
from tests.unit.storage.full_state import Case, build
from tests.unit.storage.runs import OVERLAP, PLAIN, SHARDED, Run, inject, make_chunk, train

STORAGES = {"replicated": PLAIN, "sharded": SHARDED}


def case_of(storage: str, optimizer: str = "muon", **fields: Any) -> Case:
    kept = STORAGES[storage]
    return Case(optimizer, ddp=kept, config={**kept, **fields})


def rebound(storage: str, dtype: torch.dtype) -> list[str]:
    """Step with gradients where DDP keeps them, and with others that a caller assigns."""
    found = []
    for assigns in (False, True):
        case = case_of(storage, bf16=dtype == torch.bfloat16)
        case.model["dtype"] = dtype
        chunk, optimizer = build(case)
        inject(case.run, chunk, 0)
        if assigns:
            for param in chunk.parameters():
                param.main_grad = param.main_grad.clone()
            for buffer in chunk.buffers:
                buffer.grad_data.zero_()
        optimizer.step()
        found.append([param.detach().clone() for param in chunk.parameters()])
    pairs = zip(*found, chunk.named_parameters(), strict=True)
    return [name for one, other, (name, _) in pairs if not torch.equal(one, other)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("storage", STORAGES)
def test_gradients_that_a_caller_assigns_are_stepped_with(storage, dtype):
    assert run_ranks(1, rebound, storage, dtype) == [[]]


def declared() -> None:
    """Build over a weight that is declared to be several matrices."""
    for storage, optimizer in itertools.product(STORAGES, ("muon", "soap", "lion")):
        chunk = make_chunk(case_of(storage).run)
        weight = next(p for n, p in chunk.named_parameters() if "linear_qkv.weight" in n)
        weight.eopt_split = gated(tuple(weight.shape))
        config = EmergingOptimizerConfig(optimizer=optimizer, lr=0.01, **STORAGES[storage])
        if (storage, optimizer) == ("replicated", "soap"):
            with pytest.raises(ConfigurationError, match=r"linear_qkv.weight.eopt_split"):
                get_megatron_optimizer(config, [chunk])
        else:
            groups = get_megatron_optimizer(config, [chunk]).param_groups
            assert {group["optimizer"] for group in groups} == {"adam", optimizer}


def test_declared_matrices_are_stepped_one_by_one_or_refused():
    run_ranks(1, declared)


def alone(partial: bool) -> str:
    """Build with groups of one rank each, of which the tensor-parallel one is left out."""
    initialize_megatron()
    groups = [distributed.new_group([rank]) for rank in range(2)]
    mine = parallel_state.get_data_parallel_group() if partial else groups[distributed.get_rank()]
    collection = ProcessGroupCollection(dp=mine)
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.01)
    chunk = make_chunk(Run(ddp=PLAIN))
    try:
        get_megatron_optimizer(config, [chunk], pg_collection=collection)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_process_groups_that_lack_the_tensor_parallel_one():
    assert run_ranks(2, alone, True) == ["", ""]
    for error in run_ranks(2, alone, False):
        assert "pg_collection.tp=None: is required because dp differs from" in error


@pytest.mark.parametrize("buckets", [{}, {"bucket_size": 3000}], ids=["hooks", "buckets"])
def test_parameters_are_gathered_by_a_ddp_that_all_reduces(buckets):
    gathers = {"overlap_param_gather": True}
    plain = run_ranks(2, train, Run(ddp=PLAIN))
    overlapped = run_ranks(2, train, Run(ddp={**PLAIN, **OVERLAP, **buckets}, config=gathers))
    for one, other in zip(plain, overlapped, strict=True):
        assert_same(other.tensors, one.tensors)
