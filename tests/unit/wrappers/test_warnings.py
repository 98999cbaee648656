"""Who gets an update that depends on the number of ranks, or far too long a one, is told so.

Whose parameter gets none, as it was frozen when the optimizer was built, is told this, too.
"""

import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.math.orthogonalize import SCALE_MODES
from megatron_eopt.optimizers import warnings
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.log import listening
from tests.unit.contracts.callers import scheduler_of
from tests.unit.fsdp2.models import config, eager, gradient, make_model, set_gradients
from tests.unit.storage.foreign import FIELDS, STORAGES, Foreign, built, inject, wrapped
from tests.unit.storage.full_state import Case, build
from tests.unit.storage.runs import PLAIN
from tests.unit.wrappers.by_hand import scale_of


def plain(name: str, overrides: dict[str, str] | None = None, **fields: Any) -> Case:
    return Case(name, ddp=PLAIN, config=PLAIN | fields, overrides=overrides or {})


DEPENDS = "depends on the number of ranks"
ONE_MATRIX = "as one matrix without use_distributed_optimizer"
UNSPLIT = dict.fromkeys(
    [f"muon_split_{kind}" for kind in ("qkv", "gated", "mla", "linear_attention")], False
)
BLOCKWISE = {"muon_tp_mode": "blockwise"}
NO_EFFECT = "has no effect with the distributed optimizer"
BY_OWNERS = {"duplicated": 1, "distributed": 1, "exchange": 0, "auto": 0, "blockwise": 0}
TENSOR_PARALLEL = [
    # what is built, what is said of it, and how often
    (plain("muon", **BLOCKWISE), DEPENDS, 1),
    (plain("muon", muon_tp_mode="duplicated"), DEPENDS, 0),
    (plain("soap"), DEPENDS, 1),
    (Case("soap"), DEPENDS, 0),
    (plain("lion"), DEPENDS, 0),
    (plain("adam", overrides={"*linear_fc1.weight": "muon"}, **BLOCKWISE), DEPENDS, 1),
    *((Case("muon", config={"muon_tp_mode": mode}), NO_EFFECT, n) for mode, n in BY_OWNERS.items()),
    *((plain("muon", muon_tp_mode=mode), NO_EFFECT, 0) for mode in BY_OWNERS),
]
REMATERIALIZED = [case for case in TENSOR_PARALLEL if case[1] == DEPENDS]


def grows(mode: str) -> bool:
    """Whether updates of large matrices are scaled more."""
    how = SimpleNamespace(muon_scale_mode=mode, muon_extra_scale_factor=1.0)
    return scale_of(how, 64, 64) > scale_of(how, 8, 8)


ADAMUON = {"adaptive_muon_moment2_method": "adamuon"}
OFFLOAD = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
STAYS = "stays on the GPU"
IN_FLOAT32 = "products are computed in float32"
SCALE, SCION = "muon_scale_mode=", "takes the place of Scion's own"
ALONE = [
    (plain("muon", **BLOCKWISE), DEPENDS, 0),
    (plain("soap"), ONE_MATRIX, 1),
    (plain("soap", **UNSPLIT), ONE_MATRIX, 0),
    (Case("soap"), ONE_MATRIX, 0),
    (plain("muon"), ONE_MATRIX, 0),
    *(
        (plain("adaptive_muon", **ADAMUON, muon_scale_mode=mode), SCALE, int(grows(mode)))
        for mode in SCALE_MODES
    ),
    (plain("muon", **OFFLOAD), STAYS, 1),
    (Case("muon", config=OFFLOAD), STAYS, 0),
    (Case("scion", config={"weight_decay": 0.1}), SCION, 1),
    (Case("scion", config={"weight_decay": 1.0}), SCION, 0),
    (plain("muon", muon_coefficient_type="cans"), IN_FLOAT32, 1),
    (plain("muon", muon_coefficient_type="cans", muon_fp32_matmul_prec="highest"), IN_FLOAT32, 0),
]


def said(table: list[tuple[Case, str, int]], parallel: dict[str, int]) -> list[int]:
    """Return how often the words of each case are said while it is built."""
    counts = []
    for case, words, _ in table:
        warnings._said.clear()  # each is said once in a process
        with mock.patch.object(warnings, "warn") as logged:
            build(replace(case, parallel=parallel))
        counts.append(sum(words in call.args[1] for call in logged.call_args_list))
        forget_megatron()
    return counts


def check(table: list[tuple[Case, str, int]], found: list[int]) -> None:
    for (case, words, expected), count in zip(table, found, strict=True):
        assert count == expected, (case, words)


def test_what_depends_on_the_number_of_ranks_is_told():
    check(TENSOR_PARALLEL, run_ranks(2, said, TENSOR_PARALLEL, {"tp": 2})[0])
    check(REMATERIALIZED, run_ranks(2, said, REMATERIALIZED, {"gtp": 2})[0])


def test_what_else_differs_from_megatron_core_or_papers_is_told():
    check(ALONE, run_ranks(1, said, ALONE, {})[0])


@pytest.mark.parametrize("method", ["default", "adamuon"])
def test_adaptive_muon_begins_with_updates_of_muon_s_size_or_tells(method, caplog):
    warnings._said.clear()
    given = {} if method == "default" else {"adaptive_muon_moment2_method": method}
    updates = {}
    for name, fields in (("muon", {}), ("adaptive_muon", given)):
        model = torch.nn.Linear(256, 64, bias=False)
        before = model.weight.detach().clone()
        model.weight.grad = gradient(name, before.shape, 0)
        build_optimizer(model, config(name, weight_decay=0.0, **fields)).step()
        updates[name] = float((model.weight - before).norm())
    is_muons = updates["adaptive_muon"] < 2 * updates["muon"]
    assert is_muons == (method == "default") == (SCALE not in caplog.text)


def decays_of_scion(optimizer: Any) -> set[float]:
    groups = optimizer.param_groups
    return {group["weight_decay"] for group in groups if group["optimizer"] == "scion"}


@on_ranks(1)
def test_the_weight_decay_that_is_told_is_in_the_groups():
    fields = {"weight_decay": 0.1}
    for case in (plain("scion", **fields), Case("scion", config=fields)):
        _, optimizer = build(case)
        assert decays_of_scion(optimizer) == {0.1}
        scheduler_of(optimizer).step(1)
        assert decays_of_scion(optimizer) == {0.1}
        forget_megatron()
    assert decays_of_scion(build_optimizer(make_model(), config("scion", **fields))) == {0.1}


OWN_LOOPS = ("plain", "fully_shard")


@eager
def said_of_unfrozen(storage: str) -> list[list[str]]:
    """Return what each of four steps logs; the weights are unfrozen before the second one."""
    model = Foreign()
    model.hidden.requires_grad_(False)
    if storage in OWN_LOOPS:
        if storage == "fully_shard":
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        chunk: Any = model
        optimizer = build_optimizer(model, EmergingOptimizerConfig(**FIELDS), output_layers=())
    else:
        chunk = wrapped(storage, model)
        optimizer = built(storage, chunk)
    found = []
    for step in range(4):
        if step == 1:
            model.hidden.weight.requires_grad_(True)
        if storage in OWN_LOOPS:
            set_gradients(model, step)
        else:
            frozen = [p for p in model.hidden.parameters() if not hasattr(p, "main_grad")]
            for param in frozen:
                param.main_grad = param.detach().clone()
            inject(storage, chunk, step)
        with listening() as lines:
            optimizer.step()
        found.append([text for text in lines if "frozen when the optimizer was built" in text])
    return found


@pytest.mark.parametrize("storage", [*OWN_LOOPS, *STORAGES])
def test_a_parameter_that_is_unfrozen_after_the_build_is_named_once(storage):
    for quiet, named, *later in run_ranks(2, said_of_unfrozen, storage, cpu=storage in STORAGES):
        assert (quiet, later) == ([], [[], []])
        (text,) = named
        assert "hidden.weight" in text
        assert "hidden.bias" not in text
        assert "Build the optimizer again" in text


def test_a_frozen_layer_that_is_gone_is_not_asked():
    model = Foreign()
    model.hidden.requires_grad_(False)
    optimizer = build_optimizer(model, EmergingOptimizerConfig(**FIELDS), output_layers=())
    del model.hidden
    gc.collect()
    set_gradients(model, 0)
    with listening() as lines:
        optimizer.step()
    assert not [text for text in lines if "frozen when" in text]
