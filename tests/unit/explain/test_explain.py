"""What is said of a checkpoint is what wrote it; folders without a whole one raise an error."""

import argparse
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from rich.console import Console
from torch import distributed

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.explain import TRACKER, Contents, explain, show, to_json
from tests.functional.script import train
from tests.harness import run_ranks
from tests.unit.explain.written import CASES, write, write_fsdp2


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(2, write, str(folder), timeout=300)[0]


@pytest.fixture(scope="module")
def explained(saved):
    assert not distributed.is_initialized()
    folder, _ = saved
    return {path.name: explain(path) for path in folder.iterdir()}


def loads(contents: Contents) -> dict[str, bool]:
    return {target.into: target.loads for target in contents.targets}


@pytest.mark.parametrize("name", CASES)
def test_state_has_its_kinds_and_bytes(saved, explained, name):
    state = explained[name].state
    found = {kind: [amount.elements, amount.bytes] for kind, amount in state.items()}
    expected = saved[1][name]
    if name == "buckets":
        # parameters do not lie close together there
        assert found.keys() == expected.keys()
        assert all(expected[kind][0] <= found[kind][0] < 35000 for kind in found)
    else:
        assert found == expected
    assert all(amount.dtypes == ["float32"] for amount in state.values())


def test_optimizers_and_steps_are_known(explained):
    names = {name: contents.optimizers for name, contents in explained.items()}
    assert names["muon"] == names["plain"] == names["muon, TP"] == ["adam", "muon"]
    assert names["soap, TP, plain"] == ["adam", "soap"]
    assert names["buckets"] == ["adam"]
    assert {contents.step for contents in explained.values()} == {2}


def test_where_a_checkpoint_loads(explained):
    anywhere = loads(explained["muon"])
    assert anywhere["any tensor, pipeline, expert and data parallelism"]
    assert anywhere["the other storage"]
    assert loads(explained["plain"]) == anywhere
    assert anywhere["an optimizer without exp_avg, exp_avg_sq, momentum_buffer"]
    assert not anywhere["one with some of these and others"]
    by_bucket = loads(explained["buckets"])
    assert by_bucket["another data parallelism"]
    assert not by_bucket["another TP, PP or EP, or plain storage"]
    slabs = {target.into: target for target in explained["soap, TP, plain"].targets}
    for into in ("another tensor parallelism", "the other storage"):
        assert not slabs[into].loads
        assert "--checkpoint-fresh-state L Q_L Q_R R" in slabs[into].how


def test_files_of_ranks(explained):
    contents = explained["plain, torch"]
    assert (contents.format, contents.iteration) == ("torch", 2)
    assert contents.parallelism == {"TP": 1}
    assert contents.optimizers == ["adam", "muon"]
    assert list(loads(contents).values()) == [True, False]


def test_torchs_own_checkpoints(tmp_path):
    (elements, _) = run_ranks(2, write_fsdp2, str(tmp_path), cpu=False, timeout=120)
    contents = explain(tmp_path)
    assert contents.format == "torch_dcp"
    assert contents.model.elements == sum(elements.values())
    assert contents.optimizers == ["adam", "soap"]
    assert {"exp_avg", "exp_avg_sq", "L", "R"} <= contents.state.keys()


def test_a_run_of_the_trainer(tmp_path):
    flags = f"--train-iters 2 --save {tmp_path} --save-interval 1"
    muon = "--optimizer muon --use-distributed-optimizer --tensor-model-parallel-size 2"
    train(*flags.split(), *muon.split(), timeout=300)
    contents = explain(tmp_path)
    assert contents == explain(tmp_path / "iter_0000002")
    assert (contents.format, contents.iteration, contents.step) == ("torch_dist", 2, 2)
    assert contents.parallelism == {"TP": 2, "PP": 1, "CP": 1, "DP": 1, "EP": 1, "ETP": 2}
    assert explain(tmp_path / "iter_0000001").iteration == 1


@pytest.mark.parametrize("name", ["muon", "buckets", "plain, torch"])
def test_all_is_shown(explained, name):
    contents = explained[name]
    text = io.StringIO()
    show(contents, Console(file=text, width=200))
    for words in (*contents.state, *(target.into for target in contents.targets)):
        assert words in text.getvalue()
    assert "not recorded" in text.getvalue()
    as_data = json.loads(to_json(contents))
    assert as_data["step"] == 2
    assert len(as_data["targets"]) == len(contents.targets)


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def save(folder: Path) -> None:
    for name, common in (("good", {}), ("evil", {"common": Evil(folder / "called")})):
        (folder / name).mkdir()
        weight = ShardedTensor.from_rank_offsets("weight", torch.ones(4, 4))
        dist_checkpointing.save({"model": weight, **common}, folder / name)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    run_ranks(1, save, folder)
    return folder


@pytest.fixture
def copy(small, tmp_path):
    return Path(shutil.copytree(small / "good", tmp_path / "copy"))


def refused(folder: Path, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        explain(folder)


def test_folders_without_a_whole_checkpoint(tmp_path, copy):
    refused(tmp_path / "nowhere", "is no folder")
    refused(tmp_path, "is no finished checkpoint")
    (tmp_path / TRACKER).write_text("3")
    refused(tmp_path, "iter_0000003', which does not exist")
    (copy / "__0_0.distcp").write_bytes(b"cut off")
    refused(copy, r"__0_0\.distcp has 7 bytes instead of at least \d+")
    (copy / "metadata.json").unlink()
    (copy / "__0_0.distcp").unlink()
    refused(copy, r"__0_0\.distcp has 0 bytes")


def test_objects_are_read_as_data(small, copy):
    contents = explain(small / "evil")
    assert contents.model.elements == 16
    assert re.search("common_state.*Unsupported global: GLOBAL getattr", contents.notes[0])
    assert not (small / "called").exists()
    torch.save({"iteration": Evil(copy / "called")}, copy / "common.pt")
    assert "common.pt" in explain(copy).notes[0]
    (copy / ".metadata").write_bytes(b"no metadata")
    refused(copy, r"\.metadata cannot be read")
    assert not (copy / "called").exists()


def test_common_state_in_a_file_of_its_own(copy):
    args = argparse.Namespace(tensor_model_parallel_size=4, optimizer="adam")
    torch.save({"iteration": 5, "args": args}, copy / "common.pt")
    contents = explain(copy)
    assert (contents.iteration, contents.parallelism) == (5, {"TP": 4})
    assert contents.optimizers == ["adam"]
    assert loads(contents) == {"any layout": True}
