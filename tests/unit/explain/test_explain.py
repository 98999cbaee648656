"""What is said of a checkpoint is what wrote it; folders without a whole one raise an error."""

import io
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console
from torch import distributed

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.guard.contents import TRACKER
from megatron_eopt.tools.explain import explain, show
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
    assert names["plain, torch"] == names["muon"]
    assert names["soap, TP, plain"] == ["adam", "soap"]
    # buckets keep theirs with them
    assert {contents.step for contents in explained.values()} == {0, 2}
    assert explained["muon"].step == explained["plain, torch"].step == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("muon", "at any tensor, pipeline, expert and data parallelism"),
        ("buckets", "at any data parallelism, and the same TP, PP and EP"),
        ("plain, torch", "at the same layout (--ckpt-format torch)"),
    ],
)
def test_where_a_checkpoint_loads(explained, name, words):
    (loads,) = explained[name].loads
    assert words in loads
    assert explained["plain"].loads == explained["muon"].loads


def test_state_of_slabs_loads_at_their_tensor_parallelism(explained):
    _, slabs, storage = explained["soap, TP, plain"].loads
    assert "only at TP 2" in slabs
    assert "the same --use-distributed-optimizer setting" in storage
    assert all("unless you reset them: --no-load-optim" in text for text in (slabs, storage))


def test_files_of_ranks(explained):
    contents = explained["plain, torch"]
    assert (contents.format, contents.iteration) == ("torch", 2)
    assert contents.parallelism == {"TP": 1}


def test_torchs_own_checkpoints(tmp_path):
    (elements, _) = run_ranks(2, write_fsdp2, str(tmp_path), cpu=False, timeout=120)
    contents = explain(tmp_path)
    assert contents.format == "torch_dcp"
    assert contents.model.elements == sum(elements.values())
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


@pytest.mark.parametrize("name", ["muon", "plain, torch"])
def test_all_is_shown(explained, name):
    contents = explained[name]
    text = io.StringIO()
    show(contents, Console(file=text, width=300))
    for words in (*contents.state, *contents.loads):
        assert words in text.getvalue()
    assert "not recorded" in text.getvalue()
    as_data = json.loads(json.dumps(asdict(contents)))
    assert (as_data["step"], as_data["loads"]) == (2, contents.loads)


def refused(folder: Path, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        explain(folder)


def test_folders_without_a_whole_checkpoint_are_refused(saved, tmp_path):
    folder = Path(shutil.copytree(saved[0] / "muon", tmp_path / "copy"))
    (folder / "metadata.json").unlink()
    refused(folder, "lacks the file metadata.json")
    (folder / ".metadata").write_bytes(b"no metadata")
    refused(folder, r"\.metadata': cannot be read")
    refused(tmp_path / "nowhere", "is not a folder")
    refused(tmp_path, "is no complete checkpoint")
    of_others = {"model.safetensors": "weights of Hugging Face", "zero_to_fp32.py": "of DeepSpeed"}
    for name, words in (of_others | {"trainer_state.json": "of Hugging Face's Trainer"}).items():
        (other := tmp_path / "checkpoint-10").mkdir()
        (other / name).touch()
        (other / "training_args.bin").touch()
        refused(other, words)
        shutil.rmtree(other)
    (tmp_path / TRACKER).write_text("3")
    refused(tmp_path, "iter_0000003, which does not exist")
