"""Folders that cannot be explained, and checkpoints of which a part cannot be read."""

import argparse
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.explain import explain
from megatron_eopt.explain.contents import TRACKER
from tests.harness import run_ranks


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def save(folder: Path) -> None:
    key = "optimizer.state.momentum_buffer.weight"
    for name, common in (("good", {}), ("evil", {"common": Evil(folder / "called")})):
        (folder / name).mkdir()
        state = {
            "model": ShardedTensor.from_rank_offsets("weight", torch.ones(4, 4)),
            "state": ShardedTensor.from_rank_offsets(key, torch.ones(4, 4)),
        }
        dist_checkpointing.save({**state, **common}, folder / name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(1, save, folder)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return Path(shutil.copytree(saved / "good", tmp_path / "copy"))


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        explain(folder)
    for word in words:
        assert re.search(word, str(error.value)), error.value
    assert error.value.value


def test_folders_that_are_no_checkpoint(tmp_path):
    refused(tmp_path / "nowhere", "does not exist")
    refused(tmp_path, "is empty")
    (tmp_path / "notes.txt").write_text("nothing")
    refused(tmp_path, "is no checkpoint", TRACKER, "mp_rank_")
    refused(tmp_path / "notes.txt", "is a file")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        (".metadata", r"lacks the file \.metadata"),
        ("metadata.json", r"lacks the file metadata\.json"),
        ("__0_0.distcp", r"lacks the file __0_0\.distcp"),
    ],
)
def test_missing_files_are_named(copy, name, rule):
    (copy / name).unlink()
    refused(copy, rule)


def test_broken_files_are_named(copy):
    shard = copy / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:100])
    refused(copy, r"__0_0\.distcp has 100 bytes instead of at least \d+")
    (copy / ".metadata").write_bytes(b"no pickle")
    refused(copy, r"\.metadata cannot be read")
    (copy / "metadata.json").write_text("{")
    refused(copy, r"metadata\.json is damaged")
    (copy / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    refused(copy, "zarr", "Convert it to torch_dist")


def test_only_shards_are_an_unfinished_save(copy):
    for name in (".metadata", "metadata.json"):
        (copy / name).unlink()
    refused(copy, r"lacks the file \.metadata: it was not finished")


def test_runs_without_a_whole_checkpoint(tmp_path):
    (tmp_path / TRACKER).write_text("3")
    refused(tmp_path, "names '3', and there is no such folder")
    (tmp_path / TRACKER).unlink()
    (tmp_path / "iter_0000003").mkdir()
    refused(tmp_path, "no save has ever finished there")


def test_files_of_ranks(tmp_path):
    (tmp_path / "mp_rank_00").mkdir()
    refused(tmp_path, r"lacks the file mp_rank_00/model_optim_rng\.pt")
    (tmp_path / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"nothing")
    refused(tmp_path, r"mp_rank_00/model_optim_rng\.pt cannot be read as data")


def test_no_object_is_called(saved):
    contents = explain(saved / "evil")
    assert contents.model.elements == 16
    assert re.search("common_state.*Unsupported global: GLOBAL getattr", contents.notes[0])
    assert not (saved / "called").exists()


def test_optimizers_that_nothing_names(saved):
    (optimizer,) = explain(saved / "good").optimizers
    assert (optimizer.name, optimizer.elements) == ("not recorded", 16)
    assert explain(saved / "good").form == "by parameter"


def test_common_state_in_a_file_of_its_own(copy):
    args = argparse.Namespace(tensor_model_parallel_size=4)
    torch.save({"iteration": 5, "args": args}, copy / "common.pt")
    contents = explain(copy)
    assert (contents.iteration, contents.layout.tensor, contents.layout.data) == (5, 4, None)
    torch.save({"iteration": Evil(copy / "called")}, copy / "common.pt")
    contents = explain(copy)
    assert contents.iteration is None
    assert "common.pt" in contents.notes[0]
    assert not (copy / "called").exists()
