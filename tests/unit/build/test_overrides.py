"""An optimizer that overrides alone send parameters to is the one that it is as the main one."""

import math
from typing import Any

import pytest
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import OptimizerConfig, ParamKey, ParamPredicate

from megatron_eopt import (
    ConfigurationError,
    ConfigurationTypeError,
    EmergingOptimizerConfig,
    get_megatron_optimizer,
)
from megatron_eopt.base.names import GLOBAL_NAME_ATTRIBUTE
from megatron_eopt.build.bases import _check_names
from megatron_eopt.routing.model import route_model
from megatron_eopt.settings.settings import resolve
from tests.harness import run_ranks
from tests.unit.build.test_warnings import heard
from tests.unit.stores.full_state import Case
from tests.unit.stores.runs import MOE, inject, make_chunk

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
    for step in range(2):
        optimizer.zero_grad()
        inject(case.run, chunk, step)
        optimizer.step()
    weights = {name: param.detach().clone() for name, param in chunk.named_parameters()}
    return weights, {(group["optimizer"], group["max_lr"]) for group in optimizer.param_groups}


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "fragments"])
@pytest.mark.parametrize("tp", [1, 2])
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


def refused(case: Case, to: str, fields: dict[str, Any]) -> str:
    with pytest.raises((ConfigurationError, ConfigurationTypeError)) as caught:
        built(case, {ParamKey(name="*.linear_fc1.weight"): {"optimizer": to}}, **fields)
    return str(caught.value)


@pytest.mark.parametrize("main", ["adam", "muon", "soap"])
@pytest.mark.parametrize(
    ("to", "field", "value"),
    [
        ("soap", "soap_shampoo_beta", 7.0),
        ("soap", "soap_shampoo_beta", math.nan),
        ("soap", "soap_use_kl_shampoo", "no"),
        ("lion", "lion_beta1", "x"),
        ("adaptive_muon", "adaptive_muon_eps", -1.0),
        ("adaptive_muon", "adaptive_muon_moment2_method", "nope"),
        ("muon", "muon_num_ns_steps", 0),
        ("muon", "muon_lr", 1e-4),  # below min_lr
    ],
)
def test_its_fields_are_checked(main: str, to: str, field: str, value: Any) -> None:
    (words,) = run_ranks(1, refused, Case(main), to, {field: value})
    assert field in words
    assert repr(value) in words


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"max_lr": 1e-4}, "max_lr"),
        ({"min_lr": 0.02}, "min_lr"),
        ({"max_lr": 0.1, "min_lr": 0.2}, "max_lr"),
    ],
)
def test_a_schedule_that_would_grow_is_refused(values: dict[str, float], field: str) -> None:
    (words,) = run_ranks(1, refused_values, values)
    assert f"[{field!r}]={values[field]!r}: rates of" in words


def refused_values(values: dict[str, float]) -> str:
    built(Case("muon"), {MATRICES: {"max_lr": 0.1, "min_lr": 0.05}})
    with pytest.raises(ConfigurationError) as caught:
        built(Case("muon"), {MATRICES: values})
    return str(caught.value)


def test_decoupled_rates_that_would_grow_are_refused_by_their_names() -> None:
    (words,) = run_ranks(1, refused_decoupled)
    assert words.startswith("decoupled_lr=0.001: rates of the embeddings would go from")
    assert "decoupled_min_lr" in words


def refused_decoupled() -> str:
    with pytest.raises(ConfigurationError) as caught:
        built(Case("muon"), None, decoupled_lr=1e-3, decoupled_min_lr=5e-3)
    return str(caught.value)


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
@pytest.mark.parametrize(("dtype", "field"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_16_bits_without_float32_weights_are_refused(
    optimizer: str, dtype: torch.dtype, field: str
) -> None:
    plain = {"use_distributed_optimizer": False}
    case = Case(optimizer, {"dtype": dtype}, ddp=plain)
    (words,) = run_ranks(1, refused_dtype, case)
    assert words.startswith(f"{field}=False: ")


def refused_dtype(case: Case) -> str:
    with pytest.raises(ConfigurationError) as caught:
        built(case, {})
    return str(caught.value)


def warned(case: Case, fields: dict[str, Any]) -> list[str]:
    return heard(lambda: built(case, {MATRICES: {"optimizer": "muon"}}, **fields))


def test_its_update_that_depends_on_the_ranks_is_told() -> None:
    plain = {"use_distributed_optimizer": False}
    case = Case("adam", parallel={"tp": 2}, ddp=plain)
    lines = run_ranks(2, warned, case, {"muon_tp_mode": "blockwise"})[0]
    assert any("muon_tp_mode='blockwise'" in line for line in lines)


def read_by_megatron_core() -> list[int]:
    case = Case("adam")
    chunk, optimizer = built(case, None)
    inject(case.run, chunk, 0)
    optimizer.step()
    config = OptimizerConfig(
        optimizer="adam", lr=0.01, min_lr=0.001, use_distributed_optimizer=True
    )
    theirs = megatron_optimizer.get_megatron_optimizer(config, [make_chunk(case.run)])
    theirs.load_state_dict(optimizer.state_dict())
    return [int(group["step"]) for group in theirs.param_groups]


def test_megatron_core_reads_groups_of_distributed_adam() -> None:
    for steps in run_ranks(2, read_by_megatron_core):
        assert set(steps) == {1}


NUMBERED = ("*.layers.3.self_attention.linear_proj.weight", "*.layers.1.*experts.2.linear_fc1.*")


def sent(case: Case) -> list[str]:
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.01, min_lr=0.001)
    overrides = {ParamKey(name=NUMBERED): {"optimizer": "lion"}}
    optimizer = get_megatron_optimizer(config, [make_chunk(case.run)], overrides)
    lion = [group for group in optimizer.param_groups if group["optimizer"] == "lion"]
    return [getattr(param, GLOBAL_NAME_ATTRIBUTE) for group in lion for param in group["params"]]


@pytest.mark.parametrize("parallel", [{"pp": 2}, {"ep": 2}])
def test_numbers_of_layers_and_experts_are_those_of_the_whole_model(parallel: Any) -> None:
    parts = {"model": {**MOE, "layers": 4}, "ddp": {"use_distributed_optimizer": False}}
    (whole,) = run_ranks(1, sent, Case(**parts))
    assert len(whole) == 2
    ranks = run_ranks(2, sent, Case(**parts, parallel=parallel))
    assert {name for rank in ranks for name in rank} == set(whole)


TIED = {
    "model": {"untied": False, "layers": 2},
    "parallel": {"pp": 2},
    "ddp": {"use_distributed_optimizer": False},
}
EMBEDDING = ParamKey(name="*word_embeddings.weight")
LAST_STAGE = ParamKey(
    predicate=ParamPredicate(name="on the last stage", fn=lambda p: hasattr(p, "on_last_stage"))
)


def routes_of_copy(overrides: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return optimizer and settings of this stage's copy of a tied embedding."""
    chunk = make_chunk(Case("muon", **TIED).run)
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.01, min_lr=0.001)
    routes = route_model(resolve(config), [chunk], overrides).routes
    copies = [r for r in routes if getattr(r.parameter.param, "shared_embedding", False)]
    return [(route.optimizer, dict(route.values)) for route in copies]


@pytest.mark.parametrize("values", [{"wd_mult": 0.5}, {"max_lr": 0.1}, {"optimizer": "muon"}])
def test_copies_of_a_tied_embedding_are_stepped_alike(values: dict[str, Any]) -> None:
    (first,), (last,) = run_ranks(2, routes_of_copy, {EMBEDDING: values})
    assert first == last == (values.pop("optimizer", "adam"), values)


def refused_on_one_stage() -> str:
    chunk = make_chunk(Case("muon", **TIED).run)
    (copy,) = (p for p in chunk.parameters() if getattr(p, "shared_embedding", False))
    if torch.distributed.get_rank() == 1:
        copy.on_last_stage = True
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.01, min_lr=0.001)
    with pytest.raises(ConfigurationError) as caught:
        get_megatron_optimizer(config, [chunk], {LAST_STAGE: {"wd_mult": 0.0}})
    return str(caught.value)


def test_copies_that_would_not_be_are_refused_on_all_ranks() -> None:
    first, last = run_ranks(2, refused_on_one_stage)
    assert first == last
    assert "adam {'wd_mult': 0.0} and adam {}" in first


@pytest.mark.parametrize("name", ["max_lrr", "optimzer", "beta", "weightdecay"])
def test_a_misspelled_setting_is_refused_with_what_was_meant(name: str) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    _check_names(optimizer, {"max_lr", "end_wd", "betas", "color"})
    with pytest.raises(ConfigurationError, match=f"{name}.*Did you mean"):
        _check_names(optimizer, {"eps", name})
