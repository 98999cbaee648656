"""State that another optimizer wrote continues only where it means the same, on every storage.

All steps have the same gradients, so state tends to a value that shows what it means: a mean to the
gradient, a sum to a multiple of it. tests/unit/fsdp2 does the same for all pairs in an own loop.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_eopt import ConfigurationError
from megatron_eopt.checkpoint.keys import split_key
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.unit.storage.full_state import Case, build, full_state, inject, resume, write
from tests.unit.storage.runs import REPLICATED

NAMES = ("adam", "laprop", "lion", "muon", "sgd", "soap")
NAMES += ("adaptive_muon", "oblique_sgd", "psgd_pro")
TINY = {"layers": 1, "hidden": 16, "heads": 2, "query_groups": 1, "gated": True, "vocabulary": 32}
STEPS = 12


def case_of(name: str, storage: dict[str, Any]) -> Case:
    config = {**storage.get("config", {}), "lr": 1e-7, "weight_decay": 0.0, "sgd_momentum": 0.5}
    return Case(name, TINY, ddp=storage.get("ddp", {}), config=config)


def trained(case: Case, folder: str) -> dict[str, Any]:
    chunk, optimizer = build(case)
    decay_fast(optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        inject(case.run, chunk, 0)
        optimizer.step()
    write(case, chunk, optimizer, folder)
    return state_of(case, chunk, optimizer)


def decay_fast(optimizer: Any) -> None:
    """Let means of equal gradients converge in a few steps."""
    for group in optimizer.param_groups:
        group |= {k: v for k, v in {"momentum": 0.5, "betas": (0.5, 0.5)}.items() if k in group}


def state_of(case: Case, chunk: Any, optimizer: Any) -> dict[str, Any]:
    """Return state by parameter and kind, without main weights and step counts."""
    found = full_state(case, chunk, optimizer)
    kinds = {key: split_key(key) for key in found}
    return {
        key: found[key]
        for key, parts in kinds.items()
        if parts and parts.kind not in (None, "param", "fp32_param", "step")
    }


def of_parameters(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        found.setdefault(split_key(key).name, {})[key] = value
    return found


def check_pairs(storage: dict[str, Any], folder: str) -> dict[Any, str]:
    """Load all optimizers' states into all others; return what became of each."""
    states = {}
    for name in NAMES:
        states[name] = trained(case_of(name, storage), f"{folder}/{name}")
        forget_megatron()
    outcomes = {}
    for reader in NAMES:
        for writer in NAMES:
            outcomes[writer, reader] = outcome(writer, reader, storage, folder, states)
            forget_megatron()
    return outcomes


def outcome(writer: str, reader: str, storage: Any, folder: str, states: dict[str, Any]) -> str:
    case = case_of(reader, storage)
    start = state_of(case, *build(case))
    forget_megatron()
    try:
        chunk, optimizer = resume(case, f"{folder}/{writer}", adjust=decay_fast)
    except ConfigurationError as error:
        return f"refused: {error}"
    loaded = of_parameters(state_of(case, chunk, optimizer))
    own = of_parameters(states[reader])
    became = set()
    for name, values in loaded.items():
        if all(same(value, start[key]) for key, value in values.items()):
            # megatron-core gives learned positions to the main optimizer, and this package to Adam
            is_moved = "position_embeddings" in name
            assert writer != reader or not values or is_moved
            became.add("fresh")
            continue
        became.add("continues")
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                torch.testing.assert_close(value, own[name][key], rtol=0.1, atol=1e-4)
    return " and ".join(sorted(became))


STOCK = ("laprop", "lion", "muon", "sgd")


def check_stock(names: tuple[str, ...], folder: str) -> dict[Any, str]:
    """Load what megatron-core's own factory writes, with and without one of its flags."""
    states = {}
    for name in dict.fromkeys((*names, *STOCK)):
        states[name] = trained(case_of(name, REPLICATED), f"{folder}/ours")
        forget_megatron()
    for name in STOCK:
        trained(replace(case_of(name, REPLICATED), stock=True), f"{folder}/{name}")
        forget_megatron()
    return {
        (writer, reader): outcome(writer, reader, REPLICATED, folder, states)
        for reader in names
        for writer in STOCK
        if not forget_megatron()
    }


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "storage"), [(1, REPLICATED), (2, {})], ids=["plain", "sharded"])
def test_state_continues_only_where_it_means_the_same(tmp_path, ranks, storage):
    outcomes = run_ranks(ranks, check_pairs, storage, str(tmp_path), timeout=300)[0]
    for name in NAMES:
        assert outcomes[name, name] == "continues"
    assert "exp_avg, exp_avg_sq are laprop's" in outcomes["laprop", "adam"]
    assert outcomes["sgd", "muon"] == "continues and fresh"  # the fresh ones are Adam's now


def test_state_of_megatron_cores_own_optimizers(tmp_path):
    """Its checkpoints name neither parameters nor the main optimizer."""
    names = ("adam", "laprop", "lion", "muon")
    outcomes = run_ranks(1, check_stock, names, str(tmp_path), timeout=300)[0]
    assert all("continues" in outcomes[name, name] for name in ("laprop", "lion", "muon"))
    assert "exp_avg, exp_avg_sq are laprop's" in outcomes["laprop", "adam"]
    # Lion's parameters start fresh, and only learned positions are Adam's in one of the two
    assert (
        "checkpoint='embedding.position_embeddings.weight: exp_avg'" in outcomes["laprop", "lion"]
    )
    assert outcomes["sgd", "muon"] == "continues and fresh"
