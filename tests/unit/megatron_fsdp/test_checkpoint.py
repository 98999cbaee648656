"""State in format ``fsdp_dtensor``: written, read into another strategy and number of ranks."""

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
    preprocess_state_dict_for_uneven_dtensor,
)
from torch.distributed import checkpoint

from megatron_eopt import ConfigurationError
from megatron_eopt.base.agreement import gather_objects
from megatron_eopt.checkpoint.catalogue import Catalogue
from megatron_eopt.checkpoint.fsdp_dtensor import match
from megatron_eopt.checkpoint.keys import Saved
from megatron_eopt.state.groups import BY_PARAMETER
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.models import assert_same, synthetic_batch
from tests.harness.tiers import mostly_long
from tests.unit.fsdp2.models import eager
from tests.unit.megatron_fsdp.runs import make_chunk, make_optimizer, stepped, weights
from tests.unit.storage import runs as storage_runs
from tests.unit.storage.runs import DENSE, MOE, Result, Run, deviation, global_name

FORM = {"distrib_optim_sharding_type": "fsdp_dtensor"}
RUNS = {
    "muon": Run(steps=4),
    "adam": Run(config={"optimizer": "adam"}, steps=4),
    "normuon": Run(config={"optimizer": "normuon"}, steps=4),
    "soap": Run(config={"optimizer": "soap"}, steps=4),
    "experts": Run(model={**MOE, "gated": True}, steps=4),
    "bf16": Run(model={**DENSE, "dtype": torch.bfloat16}, config={"bf16": True}, steps=4),
}
ALL, FEW = tuple(RUNS), ("muon", "bf16")
OPTIM = {"data_parallel_sharding_strategy": "optim"}


def state_of(chunk: Any, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    """Return what the trainer saves or loads in place, without its split of the model's gates."""
    chunk.module._replace_param_with_distributed_if_needed()
    state = {"model": chunk.state_dict()}
    state["optimizer"] = optimizer.sharded_state_dict(
        state["model"], is_loading=is_loading, metadata=FORM
    )
    preprocess_state_dict_for_uneven_dtensor(state)
    return state


def loss_of(model: torch.nn.Module) -> float:
    batch = synthetic_batch(0)
    losses = model(batch.tokens, batch.positions, None, labels=batch.labels)
    return float(losses.float().mean())


def without_wrapper(run: Run, chunk: Any) -> torch.nn.Module:
    """Return the model with the main weights."""
    found = weights(run, chunk)
    model = storage_runs.make_chunk(run, lambda model, **_: model)
    for name, param in model.named_parameters():
        param.data.copy_(found[global_name(name, run.model)][1])
    return model


@eager
def second_halves(
    folder: str, names: Sequence[str], ddp: dict[str, Any] | None = None
) -> dict[str, Result]:
    """Return the weights of each run after all of its steps.

    After half of them it is saved, or, in a DDP that is given, loaded into a model that has taken
    another step.
    """
    results = {}
    for name in names:
        run = replace(RUNS[name], ddp=ddp or {})
        chunk = make_chunk(run)
        optimizer = make_optimizer(run, chunk)
        stepped(run, chunk, optimizer, *((0, 2) if ddp is None else (7, 8)))
        state = state_of(chunk, optimizer, is_loading=ddp is not None)
        if ddp is None:
            checkpoint.save(state, checkpoint_id=f"{folder}/{name}")
        else:
            checkpoint.load(state, checkpoint_id=f"{folder}/{name}")
            optimizer.load_state_dict(state["optimizer"])
        assert optimizer.chained_optimizers[0].steps == 2
        if ddp is not None:
            # what the model computes with are the main weights, or their copies
            expected = pytest.approx(loss_of(without_wrapper(run, chunk)), rel=1e-6)
            assert loss_of(chunk) == expected
        stepped(run, chunk, optimizer, 2, 4)
        results[name] = Result(weights(run, chunk), [])
        forget_megatron()
    return results


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    @functools.cache
    def save(names: tuple[str, ...]) -> tuple[str, list[dict[str, Result]]]:
        folder = str(tmp_path_factory.mktemp("checkpoint"))
        return folder, run_ranks(2, second_halves, folder, names, timeout=120)

    return save


@pytest.mark.parametrize(
    ("world", "ddp", "tolerance", "names"),
    mostly_long(
        [(2, {}, 0.0, ALL), (2, OPTIM, 1e-6, ALL), (4, {}, 1e-6, ALL), (2, OPTIM, 1e-6, FEW)],
        (2, OPTIM, 1e-6, FEW),
    ),
    ids=["the same", "another strategy", "other ranks", "few"],
)
def test_a_run_goes_on(saved, world, ddp, tolerance, names):
    folder, expected = saved(names)
    results = run_ranks(world, second_halves, folder, names, ddp, timeout=280)
    for name in names:
        found = deviation([result[name] for result in results], expected[0][name])
        assert found <= tolerance, (name, found)


BF16_MOMENTUM = {"muon_momentum_dtype": "bf16"}


@pytest.mark.parametrize(
    ("optimizer", "fields"),
    [("muon", {}), ("muon", BF16_MOMENTUM), pytest.param("adam", {}, marks=pytest.mark.long)],
)
@on_ranks(4)
def test_every_rank_asks_for_the_same(optimizer, fields):
    """Finding out who holds what is collective, so that a missing key would be a deadlock."""
    run = Run(model={**DENSE, "layers": 1}, config={"optimizer": optimizer} | fields)
    chunk = make_chunk(run)
    its = make_optimizer(run, chunk)
    momenta = [held for held in its.chained_optimizers[0].optimizer.state.values() if held]
    before = [{kind: value.dtype for kind, value in held.items()} for held in momenta]
    state = its.sharded_state_dict({}, metadata=FORM)["state"]
    # a load takes momentum in float32; a save leaves it in few bits
    assert [{kind: value.dtype for kind, value in held.items()} for held in momenta] == before
    # by the keyword of earlier releases, too
    form = FORM["distrib_optim_sharding_type"]
    assert its.sharded_state_dict({}, sharding_type=form)["state"].keys() == state.keys()
    assert any(not param.to_local().numel() for param in chunk.parameters())
    with pytest.raises(ConfigurationError, match="ckpt_format"):
        its.sharded_state_dict({}, metadata={})
    asked = {f"{name}: {kind}" for name, values in state.items() for kind in values}
    assert gather_objects(asked) == [asked] * 4
    kind = "momentum_buffer" if optimizer == "muon" else "exp_avg"
    fc1 = "module.module.decoder.layers.0.mlp.linear_fc1.weight"
    assert {f"{fc1}_w: {kind}", f"{fc1}_v: {kind}"} <= asked


def storage_of(*readers: tuple[str, dict[str, Any], set[str]], steps: int = 0) -> Any:
    """Return what the matching reads: names, groups, and kinds that may be missing."""
    assigned = [
        SimpleNamespace(
            groups=list,
            rule=SimpleNamespace(
                name="",
                optional_state=frozenset(optional),
                numbered=lambda _, entry=(group, name, 0): [entry],
            ),
        )
        for name, group, optional in readers
    ]
    return SimpleNamespace(assigned=assigned, steps=steps, _param_name=lambda name: name)


@on_ranks(2)
@eager
def test_a_state_dict_is_loaded_too():
    run = Run()
    chunk = make_chunk(run)
    optimizer = make_optimizer(run, chunk)

    def momenta() -> dict[str, torch.Tensor]:
        state = optimizer.chained_optimizers[0].optimizer.state.values()
        found = (value.get("momentum_buffer") for value in state)
        return {str(n): t.to_local().clone() for n, t in enumerate(found) if t is not None}

    stepped(run, chunk, optimizer, 0, 2)
    saved, before = copy.deepcopy(optimizer.state_dict()), momenta()
    stepped(run, chunk, optimizer, 2, 4)
    assert not all(torch.equal(now, before[name]) for name, now in momenta().items())
    optimizer.load_state_dict(saved)
    assert_same(momenta(), before)
    assert optimizer.chained_optimizers[0].steps == 2


ADAM = {"optimizer": "adam", "lr": 1}


def test_state_of_another_optimizer_is_not_read_in_place():
    """Of Lion's state Adam would take the first moment and the count of steps."""
    moments = {kind: torch.zeros(2, 3) for kind in ("exp_avg", "exp_avg_sq", "step", "param")}
    wanted = {
        "state": {"weight": moments, "bias": {"exp_avg": 1}, "spared": {"param": 0, "scale": 0}},
        BY_PARAMETER: {"weight": {"lr": 1, "momentum": 0.9}, "bias": {"lr": 1}},
    }
    has = ("weight.exp_avg", "weight.step", "weight.param", "bias.exp_avg", "spared.param")
    saved = {name: Saved(name.partition(".")[2], name.partition(".")[0]) for name in has}
    groups = {"weight": {"lr": None, "optimizer": "lion"}, "bias": ADAM, "spared": ADAM}
    storage = storage_of(
        ("weight", ADAM, set()), ("bias", ADAM, set()), ("spared", ADAM, {"scale"})
    )
    match(storage, wanted, Catalogue("fsdp_dtensor", saved, settings=groups))
    assert storage.fresh == {"weight"}
    left = {name: set(values) for name, values in wanted["state"].items()}
    assert left == {"weight": {"param"}, "bias": {"exp_avg"}, "spared": {"param"}}
    assert wanted[BY_PARAMETER] == {"weight": {"lr": 1}, "bias": {"lr": 1}}


def test_a_weight_in_two_parts_continues_as_a_whole():
    def left_of(*has: str, shape: tuple[int, ...] = (2, 2)) -> dict[str, set[str]]:
        kinds = ("exp_avg", "exp_avg_sq", "step")
        first = {kind: torch.zeros(2, 2) for kind in kinds}
        second = {kind: torch.zeros(2, 2) for kind in kinds[:2]}
        state = {"state": {"gate_w": first, "gate_v": second}, BY_PARAMETER: {"gate": {"lr": 1}}}
        saved = {name: Saved(*name.split(".")[::-1], shape) for name in has}
        catalogue = Catalogue("fsdp_dtensor", saved, settings={"gate": ADAM})
        match(storage_of(("gate", ADAM, set())), state, catalogue)
        return {part: set(values) for part, values in state["state"].items()}

    whole = ("gate_w.exp_avg", "gate_w.exp_avg_sq", "gate_w.step", "gate_v.exp_avg")
    both = (*whole, "gate_v.exp_avg_sq")
    continues = {"gate_w": {"exp_avg", "exp_avg_sq", "step"}, "gate_v": {"exp_avg", "exp_avg_sq"}}
    assert left_of(*both) == continues
    with pytest.raises(ConfigurationError, match="gate: exp_avg_sq is of a part of the weight"):
        left_of(*whole)
    with pytest.raises(ConfigurationError, match=r"of shape \(3, 2\) must have shape \(2, 2\)"):
        left_of(*both, shape=(3, 2))
