"""What is said of a checkpoint is what wrote it."""

import io
import json
import math
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import distributed

from megatron_eopt.explain import Contents, explain, show, to_json
from megatron_eopt.explain.contents import Layout
from megatron_eopt.explain.saved import Entry, Saved
from megatron_eopt.explain.targets import targets_of
from tests.functional.script import train
from tests.harness import run_ranks
from tests.unit.explain.written import CASES, Written, write, write_fsdp2


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(2, write, str(folder), timeout=300)


@pytest.fixture(scope="module")
def explained(saved):
    assert not distributed.is_initialized()
    folder, _ = saved
    names = [path.name for path in folder.iterdir()]
    return {name: explain(folder / name) for name in names}


def of_all_ranks(saved, name: str) -> Written:
    whole = Written()
    for rank in saved[1]:
        whole.state |= rank[name].state
        for optimizer, its in rank[name].steps.items():
            whole.steps.setdefault(optimizer, {}).update(its)
    return whole


def numbers(contents: Contents) -> dict[str, tuple[int, int]]:
    return {item.name: (item.parameters, item.elements) for item in contents.optimizers}


def loads(contents: Contents) -> dict[str, str]:
    return {target.where: target.verdict for target in contents.targets}


@pytest.mark.parametrize("name", [name for name in CASES if "TP" not in name])
def test_optimizers_step_what_was_routed_to_them(saved, explained, name):
    expected = of_all_ranks(saved, name).steps
    assert numbers(explained[name]) == {
        optimizer: (len(its), sum(its.values())) for optimizer, its in expected.items()
    }
    routes = explained[name].routes
    for optimizer, its in expected.items():
        own = [route for route in routes if route.optimizer == optimizer]
        assert sum(route.count for route in own) == len(its)
        assert sum(route.elements for route in own) == sum(its.values())
    assert all(route.elements == route.count * math.prod(route.shape) for route in routes)


@pytest.mark.parametrize("name", CASES)
def test_state_has_its_kinds_and_bytes(saved, explained, name):
    found: dict[str, list[int]] = {}
    for item in explained[name].optimizers:
        for state in item.states:
            amount = found.setdefault(state.kind, [0, 0])
            amount[0] += state.amount.elements
            amount[1] += state.amount.bytes
            assert state.dtypes == ("float32",)
    expected = of_all_ranks(saved, name).state
    if name == "buckets":
        # parameters do not lie close together there
        assert found.keys() == expected.keys()
        assert all(expected[kind][0] <= found[kind][0] < 35000 for kind in found)
    else:
        assert found == expected
    assert explained[name].state.bytes == sum(size for _, size in found.values())


def test_tensor_parallelism_does_not_show_in_parameters(explained):
    assert numbers(explained["muon, TP"]) == numbers(explained["muon"])
    assert explained["muon, TP"].layout == Layout(tensor=2, writers=2)
    assert explained["muon"].layout == Layout(tensor=1, writers=2)
    # 16-bit weights
    assert explained["muon, TP"].model.bytes == 2 * explained["muon"].model.bytes


def test_layers_and_experts_are_one_line(explained):
    (experts,) = [r for r in explained["experts"].routes if "experts.linear_fc1" in r.name]
    assert (experts.count, experts.shape, experts.optimizer) == (8, (128, 32), "muon")


def test_groups_have_their_settings(explained):
    muon, adam = explained["muon"].optimizers
    assert [group.identity for group in muon.groups] == ["muon/dense/"]
    assert [group.identity for group in adam.groups] == ["adam/dense/", "adam/dense/wd_mult"]
    assert muon.groups[0].settings["momentum"] == 0.95
    assert [group.settings["wd_mult"] for group in adam.groups] == [1.0, 0.0]
    assert {group.settings["lr"] for group in (*muon.groups, *adam.groups)} == {0.01}


def test_where_a_checkpoint_loads(explained):
    assert explained["muon"].form == "fully_reshardable"
    anywhere = loads(explained["muon"])
    assert anywhere["any tensor, pipeline, expert and data parallelism"] == "yes"
    assert anywhere["plain storage"] == anywhere["sharded storage"] == "yes"
    assert loads(explained["plain"]) == anywhere
    assert explained["buckets"].form == "dp_reshardable"
    by_bucket = loads(explained["buckets"])
    assert by_bucket["another data parallelism, the same buckets"] == "yes"
    assert by_bucket["another tensor, pipeline or expert parallelism"] == "no"
    assert by_bucket["plain storage"] == "no"
    slabs = {target.where: target for target in explained["soap, TP, plain"].targets}
    for where in ("another tensor parallelism", "sharded storage"):
        assert slabs[where].verdict == "no"
        assert "--checkpoint-fresh-state L Q_L Q_R R" in slabs[where].how
    assert slabs["plain storage"].verdict == "yes"
    assert anywhere["an optimizer without exp_avg, exp_avg_sq, momentum_buffer"] == "yes"
    assert anywhere["one with some of these alone"] == "yes"
    assert anywhere["one with some of these and others"] == "no"


def test_which_storage_wrote_soap_is_known_from_its_arguments():
    def verdicts(kind, **args):
        entry = Entry("weight", kind, (4, 4), torch.float32, of_matrix=True)
        saved = Saved(Path(), "torch_dist", entries=[entry], common={"args": Namespace(**args)})
        found = {target.where: target.verdict for target in targets_of(saved)}
        return found["sharded storage"], found["plain storage"]

    assert verdicts("L", use_distributed_optimizer=True) == ("yes", "no")
    assert verdicts("L", use_distributed_optimizer=False) == ("no", "yes")
    assert verdicts("L") == ("not tested", "not tested")
    assert verdicts("moment2_buffer") == ("yes", "yes")
    weights = Entry("weight", "param", (4, 4), torch.float32)
    assert targets_of(Saved(Path(), "torch_dist", entries=[weights]))[-1].where == "any optimizer"


def test_files_of_ranks_hold_the_same(saved, explained):
    expected = {name: its[1] for name, its in numbers(explained["muon"]).items()}
    for name in ("muon, torch", "plain, torch"):
        contents = explained[name]
        assert (contents.format, contents.iteration) == ("torch", 2)
        assert {name: its[1] for name, its in numbers(contents).items()} == expected
        assert contents.layout == Layout(tensor=1, data=2, writers=1 + name.startswith("muon"))
        assert list(loads(contents).values()) == ["yes", "no"]
    momentum = explained["plain, torch"].optimizers[0].states[0]
    assert (momentum.kind, momentum.amount.elements) == ("momentum_buffer", expected["muon"])
    named = [route.name for route in explained["muon, torch"].routes if route.count == 2]
    assert "decoder.layers.*.mlp.linear_fc2.weight" in named


def test_torchs_own_checkpoints(tmp_path):
    (elements, _) = run_ranks(2, write_fsdp2, str(tmp_path), cpu=False, timeout=120)
    contents = explain(tmp_path)
    assert contents.format == "torch_dcp"
    assert contents.model.elements == sum(elements.values())
    assert {route.name: route.elements for route in contents.routes} == elements
    by_name = {route.name: route.optimizer for route in contents.routes}
    assert by_name["down.weight"] == "soap"
    assert by_name["embedding.weight"] == "adam"


def test_a_run_of_the_trainer(tmp_path):
    flags = f"--train-iters 2 --save {tmp_path} --save-interval 1"
    muon = "--optimizer muon --use-distributed-optimizer --tensor-model-parallel-size 2"
    train(*flags.split(), *muon.split(), timeout=300)
    contents = explain(tmp_path)
    assert contents == explain(tmp_path / "iter_0000002")
    assert (contents.format, contents.iteration) == ("torch_dist", 2)
    sizes = {"tensor": 2, "pipeline": 1, "context": 1, "data": 1, "expert": 1, "expert_tensor": 2}
    assert contents.layout == Layout(**sizes, writers=2)
    assert numbers(contents) == {"muon": (8, 98304), "adam": (12, 19072)}
    assert explain(tmp_path / "iter_0000001").iteration == 1


@pytest.mark.parametrize("name", ["muon", "buckets", "plain, torch"])
def test_all_is_shown(explained, name):
    contents = explained[name]
    text = io.StringIO()
    show(contents, Console(file=text, width=200))
    for route in contents.routes:
        assert f" {route.name} " in text.getvalue()
    for target in contents.targets:
        assert target.where in text.getvalue()
    assert "not recorded: " in text.getvalue()
    as_data = json.loads(to_json(contents))
    assert as_data["layout"]["tensor"] == 1
    assert len(as_data["routes"]) == len(contents.routes)
