"""What callers do to megatron-core's objects, done to ours."""

import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import (
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    get_standard_config_overrides,
)
from megatron.core.optimizer import emerging_optimizers as upstream

from megatron_eopt import ConfigurationError, TensorParallelMuon
from megatron_eopt import emerging_optimizers as ours
from megatron_eopt.extending import LayerWiseDistributedOptimizer, MuonRule
from megatron_eopt.wrappers.factory import get_megatron_optimizer
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.models import assert_same, copies_of
from tests.unit.contracts.callers import STORAGES, build, gradients
from tests.unit.storage import runs
from tests.unit.storage.runs import Run, inject, make_chunk

SHARDED = Run()
PLAIN = Run(ddp={"use_distributed_optimizer": False})


class HalvedRule(MuonRule):
    def _update(self, stack, *args):
        super()._update(stack, *args)
        stack /= 2


class Halved(TensorParallelMuon):
    update_rule_class = HalvedRule


def config_of(optimizer="muon", **fields):
    own = {"lr": 0.1, "min_lr": 0.0, "weight_decay": 0.0, "clip_grad": 0.0}
    return OptimizerConfig(optimizer=optimizer, **own, muon_fp32_matmul_prec="highest", **fields)


def named(chunk, part):
    return next(p for name, p in chunk.named_parameters() if part in name)


def registered(name, entry):
    """Put an entry among ours as a caller of megatron-core's module does."""
    return mock.patch.dict(ours._EMERGING_OPTIMIZERS, {name: entry})


def entry_over(cls, **fields):
    kwargs = ours._muon_config_to_kwargs
    return ours.EmergingOptimizerEntry(optimizer_cls=cls, config_to_kwargs=kwargs, **fields)


def _update_of_qkv(run, optimizer):
    chunk = make_chunk(run)
    sharded = run.ddp.get("use_distributed_optimizer", True)
    config = config_of(optimizer, use_distributed_optimizer=sharded)
    chain = get_megatron_optimizer(config, [chunk])
    for group in chain.param_groups:
        group["lr"] = 0.1
    weight = named(chunk, "linear_qkv.weight")
    before = weight.detach().clone()
    inject(run, chunk, 0)
    chain.step()
    return weight.detach() - before


@pytest.mark.parametrize(
    ("run", "cls", "factor"), [(SHARDED, TensorParallelMuon, 1), (PLAIN, Halved, 0.5)]
)
@on_ranks(1)
def test_a_muon_of_the_callers_splits_fused_weights_as_ours_does(run, cls, factor):
    with registered("mine", entry_over(cls)):
        mine = _update_of_qkv(run, "mine")
    torch.testing.assert_close(mine, _update_of_qkv(run, "muon") * factor)


@on_ranks(1)
def test_an_entry_with_upstreams_names_means_what_it_says():
    with registered("muon", entry_over(TensorParallelMuon)):
        assert get_megatron_optimizer(config_of(), [make_chunk(PLAIN)])

    def is_none(param):
        return param.dim() != 2 or param.shape[0] > param.shape[1]

    rule = ParamKey(predicate=ParamPredicate("nonlinear_or_embedding", is_none))
    entry = entry_over(TensorParallelMuon, default_param_overrides={rule: {"optimizer": "adam"}})
    with registered("mine", entry):
        chunk = make_chunk(PLAIN)
        chain = get_megatron_optimizer(config_of("mine"), [chunk])
    muon = chain.chained_optimizers[0].optimizer
    assert muon.update_rules[0].name == "TensorParallelMuon"
    held = {param for group in muon.param_groups for param in group["params"]}
    assert held
    assert not any(map(is_none, held))


def _wrapped(run, cls, *, with_chunks=True):
    chunk = make_chunk(run)
    config = runs.make_config(run)
    qkv = named(chunk, "linear_qkv.weight")
    qkv.test_is_qkv = True
    matrices, others = runs.param_groups(run, config, chunk)
    matrices, others = ([g for g in groups if g["params"]] for groups in (matrices, others))
    bases = [runs.muon_over(matrices, config, chunk, cls), runs.adam_over(others, config)]
    chunks = [chunk] if with_chunks else None
    return chunk, qkv, bases, LayerWiseDistributedOptimizer(bases, config, None, None, chunks)


@on_ranks(2)
def test_what_is_written_to_wrapped_optimizers_counts():
    chunk, _, bases, chain = _wrapped(SHARDED, TensorParallelMuon)
    before = [param.detach().clone() for param in chunk.parameters()]
    for step in range(2):
        groups = [group for base in bases for group in base.param_groups]
        assert len(groups) == len(chain.param_groups)
        for group in groups:
            group["lr"] = 0.0
        inject(SHARDED, chunk, step)
        chain.step()
    assert all(map(torch.equal, chunk.parameters(), before))
    for base in bases:
        with pytest.raises(ConfigurationError, match="has no state of its own"):
            base.state_dict()


@on_ranks(2)
def test_upstreams_muon_splits_fused_weights_at_owners():
    updates = []
    for cls in (upstream.TensorParallelMuon, TensorParallelMuon):
        chunk, qkv, _, chain = _wrapped(SHARDED, cls)
        before = qkv.detach().clone()
        runs.set_lr(chain, runs.make_config(SHARDED))
        inject(SHARDED, chunk, 0)
        chain.step()
        updates.append(qkv.detach() - before)
    # float32: two implementations of one iteration
    torch.testing.assert_close(*updates, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("run", [PLAIN, replace(PLAIN, model=runs.MOE, parallel={"ep": 2})])
@on_ranks(2)
def test_parameters_alone_step_as_those_of_known_chunks(run):
    weights = []
    for with_chunks in (True, False):
        chunk, _, _, chain = _wrapped(run, TensorParallelMuon, with_chunks=with_chunks)
        inject(run, chunk, 0)
        for param in () if with_chunks else chunk.parameters():
            param.grad, param.main_grad = param.main_grad, None
        chain.step()
        weights.append(copies_of(chunk))
    assert_same(*weights)


@on_ranks(1)
def test_weights_are_tagged_for_optimizers_of_matrices_alone():
    for other, is_tagged in (("sgd", False), ("muon", True)):
        chunk = make_chunk(PLAIN)
        overrides = {ParamKey(name="*linear_qkv.weight"): {"optimizer": other}}
        get_megatron_optimizer(config_of("adam"), [chunk], overrides)
        assert hasattr(named(chunk, "linear_qkv.weight"), "is_qkv") == is_tagged


@on_ranks(1)
def test_groups_of_a_member_stay_as_they_are():
    chain = get_megatron_optimizer(config_of(use_distributed_optimizer=True), [make_chunk(SHARDED)])
    inner = chain.chained_optimizers[0].optimizer
    with pytest.raises(ConfigurationError, match="add_param_group"):
        inner.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    inner.param_groups.append({**inner.param_groups[0], "params": []})
    with pytest.raises(ConfigurationError, match=r"param_groups=.* groups"):
        chain.step()


def _members_alone(prepared):
    chunk = make_chunk(SHARDED)
    chain = get_megatron_optimizer(config_of(use_distributed_optimizer=True), [chunk])
    inject(SHARDED, chunk, 0)
    if prepared:
        chain.prepare_grads()
    for member in chain.chained_optimizers:
        member.step_with_ready_grads() if prepared else member.step()
    return copies_of(chunk)


@pytest.mark.parametrize("prepared", [False, True])
def test_a_member_that_steps_alone_brings_its_weights_to_all_ranks(prepared):
    assert_same(*run_ranks(2, _members_alone, prepared))


# ms-swift replaces megatron-core's private grouping function; what it says must count

ORIGINAL = megatron_optimizer._get_param_groups


@functools.wraps(ORIGINAL)
def embeddings_at_half(model_chunks: Any, config: Any, config_overrides: Any) -> Any:
    """Give embeddings a learning rate of their own, as ms-swift gives one to a vision tower."""
    groups = ORIGINAL(model_chunks, config, config_overrides)
    apart = {id(named(chunk, "word_embeddings")) for chunk in model_chunks}
    result = []
    for group in groups:
        own = [param for param in group["params"] if id(param) in apart]
        rest = [param for param in group["params"] if id(param) not in apart]
        result.append({**group, "params": rest})
        if own:
            result.append({**group, "params": own, "max_lr": 0.5, "default_config": False})
    return result


def _means_the_same_as_overrides(storage: str) -> None:
    outcomes, half = [], {ParamKey(name="*word_embeddings*"): {"max_lr": 0.5}}
    for by, own in ((embeddings_at_half, None), (ORIGINAL, half)):
        chunk, optimizer = build(STORAGES[storage])
        config = optimizer.config
        overrides = own and {**get_standard_config_overrides(config), **own}
        with mock.patch.object(megatron_optimizer, "_get_param_groups", by):
            optimizer = get_megatron_optimizer(config, [chunk], overrides)
        for group in optimizer.param_groups:
            group["lr"] = group["max_lr"]
        gradients(chunk, optimizer, 0)
        optimizer.step()
        settings = [
            {name: value for name, value in group.items() if name not in ("params", "group_id")}
            for group in optimizer.param_groups
        ]
        outcomes.append((settings, copies_of(chunk)))
    (groups, weights), (expected_groups, expected_weights) = outcomes
    assert groups == expected_groups
    assert {group["max_lr"] for group in groups} == {0.01, 0.5}
    assert_same(weights, expected_weights)


@pytest.mark.parametrize("storage", ["replicated-muon", "layer-wise-muon"])
def test_a_replaced_grouping_means_the_same_as_overrides(storage):
    run_ranks(STORAGES[storage].world, _means_the_same_as_overrides, storage)
