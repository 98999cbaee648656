"""An optimizer that overrides alone send parameters to is the one that it is as the main one.

Parameters with arguments of their own keep their state, and overlap like all others.
"""

from functools import partial
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import OptimizerConfig, ParamKey, ParamPredicate

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig, get_megatron_optimizer
from megatron_eopt.base.names import GLOBAL_NAME_ATTRIBUTE
from megatron_eopt.config.settings import resolve
from megatron_eopt.routing.model import route_model
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.models import assert_same, copies_of
from tests.unit.storage.full_state import Case, resume, steps, write
from tests.unit.storage.runs import MOE, OVERLAP, PLAIN, SHARDED, inject, make_chunk

MATRICES = ParamKey(
    predicate=ParamPredicate(
        "matrices",
        lambda p: p.dim() == 2 and not getattr(p, "is_embedding_or_output_parameter", False),
    )
)


def built(case: Case, overrides: Any, **fields: Any) -> tuple[Any, Any]:
    chunk = make_chunk(case.run)
    sharded = case.ddp.get("use_distributed_optimizer", True)
    run = {"lr": 0.01, "min_lr": 0.001, "clip_grad": 0.0, "use_distributed_optimizer": sharded}
    config = EmergingOptimizerConfig(optimizer=case.optimizer, **run, **fields)
    return chunk, get_megatron_optimizer(config, [chunk], overrides)


def stepped(case: Case, to: str, fields: dict[str, Any]) -> tuple[dict[str, Any], set[Any]]:
    chunk, optimizer = built(case, {MATRICES: {"optimizer": to}}, **fields)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    steps(case, chunk, optimizer, 0, 2)
    rates = {(group["optimizer"], group["max_lr"]) for group in optimizer.param_groups}
    return copies_of(chunk), rates


@pytest.mark.parametrize(("sharded", "tp"), [(False, 2), (True, 1)], ids=["whole", "fragments"])
def test_muon_beside_adam_is_muon(sharded: bool, tp: int) -> None:
    fields = {"muon_lr": 0.03, "muon_fp32_matmul_prec": "highest"}
    parts = {"parallel": {"tp": tp}, "ddp": {"use_distributed_optimizer": sharded}}
    beside, main = (
        run_ranks(2, stepped, Case(name, **parts), "muon", fields) for name in ("adam", "muon")
    )
    for (weights, rates), (expected, _) in zip(beside, main, strict=True):
        assert rates == {("muon", 0.03), ("adam", 0.01)}
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            # gradients of the same parameters are summed in other orders
            torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@on_ranks(2)
def test_megatron_core_reads_groups_of_distributed_adam() -> None:
    case = Case("adam")
    chunk, optimizer = built(case, None)
    inject(case.run, chunk, 0)
    optimizer.step()
    fields = {"lr": 0.01, "min_lr": 0.001, "use_distributed_optimizer": True}
    config = OptimizerConfig(optimizer="adam", **fields)
    theirs = megatron_optimizer.get_megatron_optimizer(config, [make_chunk(case.run)])
    theirs.load_state_dict(optimizer.state_dict())
    assert {int(group["step"]) for group in theirs.param_groups} == {1}


NUMBERED = ("*.layers.3.self_attention.linear_proj.weight", "*.layers.1.*experts.2.linear_fc1.*")


def sent(case: Case) -> list[str]:
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.01, min_lr=0.001)
    overrides = {ParamKey(name=NUMBERED): {"optimizer": "lion"}}
    optimizer = get_megatron_optimizer(config, [make_chunk(case.run)], overrides)
    lion = [group for group in optimizer.param_groups if group["optimizer"] == "lion"]
    return [getattr(param, GLOBAL_NAME_ATTRIBUTE) for group in lion for param in group["params"]]


@pytest.mark.parametrize("parallel", [{"pp": 2}, {"ep": 2}])
def test_numbers_of_layers_and_experts_are_those_of_the_whole_model(parallel: Any) -> None:
    parts = {"model": {**MOE, "layers": 4}, "ddp": PLAIN}
    (whole,) = run_ranks(1, sent, Case(**parts))
    assert len(whole) == 2
    ranks = run_ranks(2, sent, Case(**parts, parallel=parallel))
    assert {name for rank in ranks for name in rank} == set(whole)


EMBEDDING = ParamKey(name="*word_embeddings.weight")


@pytest.mark.parametrize("values", [{"wd_mult": 0.5}, {"max_lr": 0.1}, {"optimizer": "muon"}])
@on_ranks(2)
def test_copies_of_a_tied_embedding_are_stepped_alike(values: dict[str, Any]) -> None:
    chunk = make_chunk(Case("muon", {"untied": False, "layers": 2}, {"pp": 2}, ddp=PLAIN).run)
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.01, min_lr=0.001)
    routes = route_model(resolve(config), [chunk], {EMBEDDING: values}).routes
    (copy,) = (r for r in routes if getattr(r.parameter.param, "shared_embedding", False))
    assert (copy.optimizer, dict(copy.values)) == (values.pop("optimizer", "adam"), values)


OWN: dict[str, Any] = {"nesterov": True, "num_ns_steps": 2}


def with_own(case: Case, _: Any = None, **own: Any) -> tuple[Any, Any]:
    """Return a model and its optimizer, in which some matrices have arguments of their own."""
    chunk = make_chunk(case.run)
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.01, **case.config)
    overrides = {ParamKey(name="*proj.weight"): OWN | own}
    return chunk, get_megatron_optimizer(config, [chunk], overrides)


@pytest.mark.parametrize("storage", [PLAIN, SHARDED], ids=["replicated", "sharded"])
@on_ranks(2)
def test_a_resumed_run_is_an_uninterrupted_one(storage, tmp_path):
    """Compare a resumed run with an uninterrupted one."""
    case, make = Case(ddp=storage, config=storage), partial(with_own, momentum_dtype="int8")
    chunk, optimizer = make(case)
    steps(case, chunk, optimizer, 0, 2)
    write(case, chunk, optimizer, tmp_path)
    steps(case, chunk, optimizer, 2, 4)
    other, its = resume(case, tmp_path, dist_checkpointing.load, make=make)
    steps(case, other, its, 2, 4)
    assert_same(copies_of(other), copies_of(chunk))


@on_ranks(1)
def test_rounded_momentum_cannot_overlap():
    flags = {"use_distributed_optimizer": True, "muon_overlap_dp_comm": True}
    case = Case(ddp=SHARDED | OVERLAP, config=flags | {"overlap_param_gather": True})
    with_own(case)
    with pytest.raises(ConfigurationError, match="needs momentum_dtype='fp32' for all parameters"):
        with_own(case, momentum_dtype="int8")
