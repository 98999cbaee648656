"""State of one parameter never becomes another's: parameters are frozen, added, removed, moved.

State that fits only in part is found by name, or refused by name, or a line says so: in own loops,
and in Megatron's chain.
"""

import copy
import logging
import zlib
from dataclasses import replace
from itertools import pairwise, permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.optimizer import ParamKey
from torch import nn
from torch.distributed.checkpoint import state_dict as dicts

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.testing.scene import forget_megatron
from tests.functional.saved_states import by_kind
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.log import listening
from tests.harness.models import assert_same, copies_of
from tests.harness.tiers import mostly_long
from tests.unit.fsdp2.models import eager
from tests.unit.storage import full_state
from tests.unit.storage.full_state import Case, build, resume_as, steps, unwrapped, write_as
from tests.unit.storage.runs import PLAIN, REPLICATED

NAMES = ("a", "b", "c", "d", "e")


def mark_of(name: str) -> float:
    """Return a number of a parameter's own, so that any exchange of state is seen."""
    return 1 + zlib.crc32(name.encode()) % 1000


def built(
    names: tuple[str, ...], optimizer: str = "adam", slow: frozenset[str] = frozenset()
) -> Any:
    """Return an optimizer over matrices with these names, of which some have half the rate."""
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in names})
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
    saved = marked(built(before, optimizer, slow_before & {*before}))
    after = built(kept, optimizer, slow_after & {*kept})
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
    saved = built(NAMES[:3]).state_dict()
    del saved["param_names"]
    after = built(NAMES[:count])
    with pytest.raises(ConfigurationError, match="a group has 3 parameters"):
        after.load_state_dict(saved)


SMALL = {"layers": 3, "hidden": 32, "gated": True, "query_groups": 2, "dtype": torch.bfloat16}
LAYERS = ("layers.0.", "layers.1.", "layers.2.")


def state_of_chain(chunk: Any, optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
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


@pytest.mark.parametrize(
    ("name", "storage", "form"),
    [
        ("muon", REPLICATED, "state_dict"),
        ("muon", {}, "torch_dist"),
        pytest.param("adam", REPLICATED, "state_dict", marks=pytest.mark.long),
        pytest.param("muon", REPLICATED, "torch_dist", marks=pytest.mark.long),
    ],
)
@on_ranks(1, timeout=120)
def test_another_layer_is_frozen_in_the_trainers_formats(tmp_path, name, storage, form):
    case, wrong = Case(name, SMALL, **storage), []
    for number, (before, after) in enumerate(permutations(LAYERS, 2)):
        path = tmp_path / str(number)
        path.mkdir()
        case = replace(case, frozen=before)
        chunk, optimizer = build(case)
        steps(case, chunk, optimizer, 0, 1)
        saved = copy.deepcopy(state_of_chain(chunk, optimizer))
        weights = write_as(form, case, chunk, optimizer, path)
        forget_megatron()
        chunk, optimizer = resume_as(form, replace(case, frozen=after), path, weights)
        for param, values in state_of_chain(chunk, optimizer).items():
            for kind in values.keys() - {"param", "fp32_param"}:
                right = saved.get(param, {}).get(kind, torch.zeros_like(values[kind]))
                if not torch.equal(values[kind], right):
                    wrong.append(f"{before} {after}: {param} {kind}")
        forget_megatron()
    assert not wrong


def test_a_missing_count_of_steps_is_named():
    optimizer = built(NAMES[:2])
    saved = copy.deepcopy(optimizer.state_dict())
    del next(iter(saved["state"].values()))["step"]
    after = built(NAMES[:2])
    with pytest.raises(ConfigurationError, match=r"a\.weight: no step.* must have all state"):
        after.load_state_dict(saved)


# state that fits in part

TINY = {"layers": 1, "hidden": 16, "heads": 2, "vocabulary": 32}


def fresh(sizes: list[int], name: str = "muon") -> tuple[nn.Module, Any]:
    """Return a model of layers between these sizes, and its optimizer."""
    model = nn.Sequential(*(nn.Linear(one, other) for one, other in pairwise(sizes)))
    return model, build_optimizer(model, EmergingOptimizerConfig(optimizer=name, lr=0.1))


def stepped(sizes: list[int], name: str = "muon") -> tuple[nn.Module, Any]:
    """Return the same after a step."""
    torch.manual_seed(len(sizes))
    model, optimizer = fresh(sizes, name)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    return model, optimizer


def state_by_name(optimizer: Any) -> dict[str, Any]:
    """Return tensors of the state by the parameter's name and kind."""
    saved = optimizer.state_dict()
    return {
        f"{saved['param_names'][number]}.{key}": value
        for number, values in saved["state"].items()
        for key, value in values.items()
        if isinstance(value, torch.Tensor) and value.dim()
    }


def test_a_count_that_a_rule_may_lack_is_not_asked_for():
    _, writer = stepped([4, 4])
    model, _ = fresh([4, 4])
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.1, muon_momentum_dtype="int8")
    reader = build_optimizer(model, config)
    reader.load_state_dict(writer.state_dict())
    assert any("momentum_buffer" in name for name in state_by_name(reader))


@eager
def test_groups_in_another_order_are_refused_as_in_a_step():
    _, writer = stepped([4, 4, 4])
    model, reader = fresh([4, 4, 4])
    reader.param_groups.reverse()
    with pytest.raises(ConfigurationError, match=r"0\.weight.*not where they were"):
        reader.load_state_dict(writer.state_dict())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(ConfigurationError, match=r"0\.weight.*not where they were"):
        reader.step()


@eager
def test_a_weight_that_is_frozen_after_the_build_is_named_with_what_to_do():
    """torch leaves out its state; it has it where the weight is frozen before the build."""
    model, optimizer = stepped([4, 4, 4])
    model[0].weight.requires_grad_(False)
    saved = dicts.get_optimizer_state_dict(model, optimizer)
    model, optimizer = fresh([4, 4, 4])
    model[0].weight.requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"0\.weight: no state.*freeze them before the"):
        dicts.set_optimizer_state_dict(model, optimizer, saved)
    model[0].weight.requires_grad_(True)
    dicts.set_optimizer_state_dict(model, optimizer, saved)


@pytest.mark.parametrize("name", ["adam", "muon", "soap"])
@eager
def test_the_state_of_another_model(name, caplog):
    _, writer = stepped([4, 4, 4, 4], name)
    saved = writer.state_dict()
    for sizes, other in (([8, 8, 8, 8], 0), ([4, 4, 8, 4], 1)):
        _, reader = fresh(sizes, name)
        before = copy.deepcopy(reader.state_dict()["state"])
        with pytest.raises(ConfigurationError, match=rf"{other}\.weight: .* must have") as error:
            reader.load_state_dict(saved)
        assert name == "soap" or "must have shape" in str(error.value)
        assert len(str(error.value)) < 400
        assert str(before) == str(reader.state_dict()["state"])
    caplog.set_level(logging.WARNING)
    fresh([4, 4, 4], name)[1].load_state_dict(saved)
    assert "2 parameter(s), 2.bias, 2.weight: is left out" in caplog.text
    caplog.clear()
    fresh([4] * 6, name)[1].load_state_dict(saved)
    assert "starts fresh" in caplog.text
    assert "4.weight" in caplog.text


@eager
def test_a_momentum_of_another_dtype_is_converted_with_a_line(caplog):
    _, writer = stepped([4, 4, 4])
    saved = writer.state_dict()
    for values in saved["state"].values():
        values |= {k: v.bfloat16() for k, v in values.items() if k == "momentum_buffer"}
    _, reader = fresh([4, 4, 4])
    caplog.set_level(logging.WARNING)
    reader.load_state_dict(saved)
    assert "momentum_buffer is converted from torch.bfloat16 to torch.float32" in caplog.text


# Megatron's chain

BF16 = {**TINY, "dtype": torch.bfloat16}
FORMS = [("state_dict", PLAIN), ("fully_reshardable", PLAIN), ("fully_reshardable", {})]


def mains_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for (kind, name), value in by_kind(state).items() if kind == "param"}


def through(
    form: str, writer: Case, reader: Case, folder: str
) -> tuple[dict[str, Any], dict[str, Any], list[str], dict[str, Any]]:
    """Save and load; return the whole state before and after, the log, and the model's weights."""
    chunk, optimizer = build(writer)
    steps(writer, chunk, optimizer, 0, 2)
    weights = write_as(form, writer, chunk, optimizer, Path(folder))
    before = full_state.full_state(writer, chunk, optimizer)
    forget_megatron()
    with listening() as lines:
        chunk, optimizer = resume_as(form, reader, Path(folder), weights)
    after = full_state.full_state(reader, chunk, optimizer)
    return before, after, lines, copies_of(unwrapped(chunk))


@pytest.mark.parametrize(
    ("optimizer", "float32"),
    mostly_long(
        product(["adam", "muon"], ["layernorm.weight", "linear_proj", "bias", "embedding"]),
        ("adam", "layernorm.weight"),
        ("muon", "linear_proj"),
    ),
)
def test_main_weights_are_those_of_their_parameters_if_some_are_float32(
    tmp_path, optimizer, float32
):
    """Of a group with both, only the 16-bit ones have main weights."""
    case = Case(optimizer, BF16, float32=float32, **REPLICATED)
    before, after, _, _ = run_ranks(1, through, "state_dict", case, case, str(tmp_path))[0]
    assert mains_of(before)
    assert_same(mains_of(after), mains_of(before))


@pytest.mark.parametrize(("form", "storage"), FORMS, ids=["dict", "plain", "sharded"])
def test_main_weights_of_another_dtype(tmp_path, form, storage):
    halves = Case("muon", BF16, ddp=storage, config=storage)
    singles = replace(halves, model=TINY)
    for name in ("down", "up"):
        Path(tmp_path, name).mkdir()
    how = (1, through, form)
    before, _, _, model = run_ranks(*how, halves, singles, str(tmp_path / "down"))[0]
    # the float32 weights are the main weights of the file, not its rounded ones
    found = {name: value for name, value in mains_of(before).items() if "linear_proj" in name}
    assert found
    own = torch.stack([value for name, value in model.items() if "linear_proj.weight" in name])
    saved = next(value for name, value in found.items() if "weight" in name)
    assert torch.equal(own.view_as(saved), saved)
    _, after, lines, _ = run_ranks(*how, singles, halves, str(tmp_path / "up"))[0]
    assert any("main weights are copied from the model's weights" in line for line in lines) or any(
        not torch.equal(value, value.bfloat16().float()) for value in mains_of(after).values()
    )


# names, in own loops


@pytest.mark.parametrize("through_torch", [False, True])
@eager
def test_names_that_look_like_numbers(through_torch):
    def built() -> tuple[nn.Module, Any]:
        model = nn.ParameterList(nn.Parameter(torch.zeros(4, 4)) for _ in range(12))
        return model, build_optimizer(model, EmergingOptimizerConfig(optimizer="muon", lr=0.1))

    model, writer = built()
    for number, param in enumerate(model):
        param.grad = torch.full((4, 4), float(number))
    writer.step()
    expected = state_by_name(writer)
    saved = dicts.get_optimizer_state_dict(model, writer)
    (group,) = saved["param_groups"]
    group["params"].reverse()
    model, reader = built()
    if through_torch:
        dicts.set_optimizer_state_dict(model, reader, saved)
    else:
        reader.load_state_dict(saved)
    assert_same(state_by_name(reader), expected)


@pytest.mark.parametrize("name", ["adam", "muon", "soap", "psgd_pro", "muon_hyperball"])
@eager
def test_fresh_state_has_nothing_of_an_earlier_load(name):
    _, same_class = stepped([4, 4, 4], name)
    _, other_class = stepped([4, 4, 4], "lion")
    _, once = fresh([4, 4, 4], name)
    _, twice = fresh([4, 4, 4], name)
    twice.load_state_dict(same_class.state_dict())
    for reader in (once, twice):
        reader.load_state_dict(other_class.state_dict())
    expected = {key: v for key, v in state_by_name(once).items() if "weight" in key}
    found = {key: v for key, v in state_by_name(twice).items() if "weight" in key}
    assert expected.keys() == found.keys()
    # what is drawn at random, or of the weights, is the optimizer's beginning
    drawn = ("Q", "hyperball_R", "L/")
    assert all(
        torch.equal(value, expected[key])
        for key, value in found.items()
        if not key.split(".")[-1].startswith(drawn)
    )


@eager
def test_a_meaning_is_known_if_torch_has_merged_groups():
    model, writer = stepped([4, 4, 4, 4], "adam")
    for group in writer.param_groups:
        group["maximize"] = True
    saved = dicts.get_optimizer_state_dict(model, writer)
    for sizes in ([4, 4, 4, 4], [4, 4, 4]):
        model, reader = fresh(sizes, "adam")
        with listening() as lines:
            reader.load_state_dict(copy.deepcopy(saved))
        assert any("starts fresh for adam: " in line for line in lines)
        assert not any(value.any() for value in state_by_name(reader).values())


def test_groups_without_settings_tell_no_optimizer():
    saved = marked(built(("a", "b")))
    saved["param_groups"] = [{"params": group["params"]} for group in saved["param_groups"]]
    with pytest.raises(ConfigurationError, match="an optimizer that the checkpoint does not tell"):
        built(("a", "b")).load_state_dict(saved)


def test_names_may_look_like_numbers():
    """As those of a list, here in torch's form, which has them in place of numbers."""
    (first, wrote), (second, read) = (listed() for _ in range(2))
    marked(wrote)
    dicts.set_optimizer_state_dict(second, read, dicts.get_optimizer_state_dict(first, wrote))
    assert marks(read) == marks(wrote)


def listed() -> tuple[nn.Module, Any]:
    model = nn.ParameterList([torch.ones(3), torch.ones(3)])
    return model, build_optimizer(model, EmergingOptimizerConfig(optimizer="lion", lr=0.1))


def test_a_state_dict_without_names_fits_the_same_parameters_alone():
    saved = marked(built(("a", "b")))
    del saved["param_names"]
    # a file may have words in place of numbers
    groups = [{**its, "params": list(map(str, its["params"]))} for its in saved["param_groups"]]
    words = {"state": {str(n): its for n, its in saved["state"].items()}, "param_groups": groups}
    numbered, worded = built(("a", "b")), built(("a", "b"))
    numbered.load_state_dict(copy.deepcopy(saved))
    worded.load_state_dict(words)
    assert marks(numbered) == marks(worded)
    assert all(mark_of(name) in values for name, values in marks(worded).items())
    with pytest.raises(ConfigurationError, match="was saved of other parameters"):
        built(("b", "a")).load_state_dict(saved)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda its: (
                its | {"param_names": {n: s for n, s in its["param_names"].items() if n != 1}}
            ),
            "parameters \\[1\\] have no name",
        ),
        (
            lambda its: its | {"param_names": dict.fromkeys(its["param_names"], "0.weight")},
            "two are",
        ),
        (lambda its: its | {"state": {**its["state"], 99: {}}}, "parameters \\[99\\]"),
        (lambda its: its | {"state": []}, "must have the keys"),
        (lambda its: its | {"state": {0: []}}, "must have the keys"),
        (lambda its: its | {"param_names": []}, "must have the keys"),
        (lambda its: its | {"param_groups": {}}, "must have the keys"),
        (lambda its: its | {"param_groups": [{"params": None}]}, "must have the keys"),
        (lambda its: its | {"param_groups": [None]}, "must have the keys"),
        (lambda its: its | {"state": {0: {"momentum_buffer": "text"}}}, "must be a tensor"),
        *(
            (lambda _, broken=broken: broken, "state_dict")
            for broken in (None, {}, [], {"state": {}}, {"param_groups": []}, 7)
        ),
    ],
)
@eager
def test_a_state_dict_with_changed_names_or_form_is_refused(change, said):
    _, writer = stepped([4, 4, 4])
    _, reader = fresh([4, 4, 4])
    before = copy.deepcopy(reader.state_dict())
    with pytest.raises(ConfigurationError, match=said):
        reader.load_state_dict(change(writer.state_dict()))
    assert str(before) == str(reader.state_dict())


@pytest.mark.parametrize(
    "step",
    [None, "two", [1], float("nan"), torch.tensor([1.0, 2.0]), torch.empty(1, device="meta")],
)
@pytest.mark.parametrize("name", ["adam", "soap"])
@eager
def test_a_count_that_is_none_is_refused_before_any_change(name, step):
    _, writer = stepped([4, 4, 4], name)
    saved = writer.state_dict()
    for values in saved["state"].values():
        values |= {"step": step} if "step" in values else {}
    _, reader = fresh([4, 4, 4], name)
    before = copy.deepcopy(reader.state_dict())
    with pytest.raises(ConfigurationError, match="step"):
        reader.load_state_dict(saved)
    assert str(before) == str(reader.state_dict())


@eager
def test_an_optimizer_of_torch_that_has_not_stepped_is_no_error():
    _, reader = fresh([4, 4, 4], "adam")
    groups = [{"params": list(group["params"])} for group in reader.param_groups]
    with listening() as lines:
        reader.load_state_dict(torch.optim.AdamW(groups).state_dict())
    assert any("starts fresh" in line for line in lines)
