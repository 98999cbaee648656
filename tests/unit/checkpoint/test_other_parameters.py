"""State of one parameter never becomes another's: parameters are frozen, added, removed, moved.

Every parameter's state is marked with a number of its own, so that any exchange is seen.
"""

import copy
import itertools
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.optimizer import ParamKey
from torch import nn

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.unit.storage.full_state import Case, build, resume_as, steps, write_as
from tests.unit.storage.runs import REPLICATED

NAMES = ("a", "b", "c", "d", "e")


def mark_of(name: str) -> float:
    return 1 + zlib.crc32(name.encode()) % 1000


def model_of(names: tuple[str, ...]) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in names})


def optimizer_of(model: nn.Module, optimizer: str, slow: frozenset[str]) -> Any:
    config = EmergingOptimizerConfig(optimizer=optimizer, lr=0.1)
    keys = {ParamKey(name=f"{name}.weight"): {"lr_mult": 0.5} for name in slow}
    return build_optimizer(model, config, keys)


def marked(optimizer: Any) -> Any:
    """Return the state dict of an optimizer after its state was marked."""
    for param, name in optimizer.names.items():
        for key, value in optimizer.state[param].items():
            if isinstance(value, torch.Tensor) and value.dim() and key != "step":
                value.fill_(mark_of(name))
    return copy.deepcopy(optimizer.state_dict())


def marks(optimizer: Any) -> dict[str, set[float]]:
    state = {name: optimizer.state[param] for param, name in optimizer.names.items()}
    return {
        name: {float(v) for value in its.values() if torch.is_tensor(value) for v in value.view(-1)}
        for name, its in state.items()
    }


subsets = st.sets(st.sampled_from(NAMES), min_size=1).map(lambda names: tuple(sorted(names)))
slow_ones = st.frozensets(st.sampled_from(NAMES), max_size=2)


@settings(max_examples=60, deadline=None)
@given(
    st.permutations(NAMES).flatmap(lambda order: st.tuples(st.just(tuple(order)), subsets)),
    subsets,
    slow_ones,
    slow_ones,
    st.sampled_from(["muon", "lion"]),
    st.sampled_from(NAMES),
    st.sampled_from([1, -1]),
)
def test_own_loop(orders, kept, slow_before, slow_after, optimizer, removed, order_of_groups):
    order, saved_names = orders
    before = tuple(name for name in order if name in saved_names)
    saved = marked(optimizer_of(model_of(before), optimizer, slow_before & {*before}))
    after = optimizer_of(model_of(kept), optimizer, slow_after & {*kept})
    left = {f"{name}.weight" for name in kept if name != removed}
    for group in after.param_groups:
        its = [param for param in group["params"] if after.names[param] in left]
        group["params"][:] = its[::order_of_groups]
    known = left & {f"{name}.weight" for name in before}
    if left and not known:
        with pytest.raises(ConfigurationError, match="state of none of this run's parameters"):
            after.load_state_dict(saved)
        return
    after.load_state_dict(saved)
    for name, found in marks(after).items():
        assert found == ({mark_of(name)} if name in known else {0.0}), name
    for group in after.param_groups:
        assert group["lr_mult"] in (0.5, 1.0)


@pytest.mark.parametrize("count", [2, 4])
def test_another_number_of_parameters_without_names_is_refused(count):
    saved = optimizer_of(model_of(NAMES[:3]), "adam", frozenset()).state_dict()
    del saved["param_names"]
    after = optimizer_of(model_of(NAMES[:count]), "adam", frozenset())
    with pytest.raises(ConfigurationError, match="a group has 3 parameters"):
        after.load_state_dict(saved)


SMALL = {"layers": 3, "hidden": 32, "gated": True, "query_groups": 2, "dtype": torch.bfloat16}
LAYERS = ("layers.0.", "layers.1.", "layers.2.")


def state_by_name(chunk: Any, optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    names = {param: name for name, param in chunk.named_parameters()}
    return {
        names[item.param]: {
            kind: value
            for kind, value in link.tensors_of(item).items()
            if torch.is_tensor(value) and value.dim()
        }
        for link in optimizer.chained_optimizers
        for item in link.shards
    }


def exchanged(case: Case, form: str, folder: Path) -> list[str]:
    """Save with one layer frozen, load with another; return the parameters with others' state."""
    wrong = []
    for number, (before, after) in enumerate(itertools.permutations(LAYERS, 2)):
        path = folder / str(number)
        path.mkdir()
        case = replace(case, frozen=before)
        chunk, optimizer = build(case)
        steps(case, chunk, optimizer, 0, 1)
        saved = copy.deepcopy(state_by_name(chunk, optimizer))
        weights = write_as(form, case, chunk, optimizer, path)
        forget_megatron()
        chunk, optimizer = resume_as(form, replace(case, frozen=after), path, weights)
        for param, values in state_by_name(chunk, optimizer).items():
            for kind in values.keys() - {"param", "fp32_param"}:
                right = saved.get(param, {}).get(kind, torch.zeros_like(values[kind]))
                if not torch.equal(values[kind], right):
                    wrong.append(f"{before} {after}: {param} {kind}")
        forget_megatron()
    return wrong


@pytest.mark.parametrize(
    ("name", "storage", "form"),
    [
        ("muon", REPLICATED, "state_dict"),
        ("muon", {}, "torch_dist"),
        pytest.param("adam", REPLICATED, "state_dict", marks=pytest.mark.long),
        pytest.param("muon", REPLICATED, "torch_dist", marks=pytest.mark.long),
    ],
)
def test_another_layer_is_frozen_in_the_trainers_formats(tmp_path: Path, name, storage, form):
    case = Case(name, SMALL, **storage)
    assert run_ranks(1, exchanged, case, form, tmp_path, timeout=120) == [[]]


def test_a_missing_count_of_steps_is_named():
    optimizer = optimizer_of(model_of(NAMES[:2]), "adam", frozenset())
    saved = copy.deepcopy(optimizer.state_dict())
    del next(iter(saved["state"].values()))["step"]
    after = optimizer_of(model_of(NAMES[:2]), "adam", frozenset())
    with pytest.raises(ConfigurationError, match=r"a\.weight: no step.* must have all state"):
        after.load_state_dict(saved)
