"""A file of another save is noticed, although it has the same name, size and kinds of content."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing

from megatron_eopt import checkpoints
from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.checkpoint.guard.files import LIST, fingerprint
from tests.harness import run_ranks
from tests.unit.checkpoint.test_pieces import Training


@pytest.mark.parametrize("count", [1, 3, 300])
def test_any_changed_number_changes_the_fingerprint(tmp_path, count):
    path = tmp_path / "model.pt"
    tensors = [torch.full((64, 33), float(number)) for number in range(count)]

    def saved() -> str:
        torch.save(tensors, path)
        return fingerprint(path)

    found = {saved()}
    assert found == {saved()}
    places = range(0, count, 23)
    for number in places:
        tensors[number][17, 5] += 1e-3
        found.add(saved())
    assert len(found) == len(places) + 1


def test_all_slices_count(tmp_path):
    path = tmp_path / "many"

    def of(values: list[float]) -> str:
        slices = []
        with path.open("wb") as file:
            for value in values:
                start = file.tell()
                torch.save(torch.full((3000,), value), file)
                slices.append((start, file.tell() - start))
        return fingerprint(path, slices)

    different = [
        [1.0, 2.0, 3.0],
        [2.0, 1.0, 3.0],
        [0.0, 2.0, 3.0],
        [1.0, 0.0, 3.0],
        [1.0, 2.0, 0.0],
    ]
    assert len({of(values) for values in different}) == len(different)


def test_a_changed_value_is_found_if_every_byte_is_read(tmp_path):
    folder, tensors = tmp_path / "model", {"a": torch.ones(9000), "b": torch.ones(9000)}
    with checkpoints.replacing(folder) as path:
        dcp.save(tensors, checkpoint_id=path, no_dist=True)
    (file,) = folder.glob("*.distcp")
    content = bytearray(file.read_bytes())
    for place in (20_000, 60_000):
        content[place] ^= 1
        file.write_bytes(content)
        assert checkpoints.checked(folder) == folder
        with pytest.raises(CheckpointError, match=file.name):
            checkpoints.checked(folder, every_byte=True)
        content[place] ^= 1
    file.write_bytes(content)
    assert checkpoints.checked(folder, every_byte=True) == folder


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_some_files_of_another_save_are_refused_and_all_are_a_later_save(tmp_path, caplog, count):
    first, second = folders = tmp_path / "first", tmp_path / "second"
    for number, folder in enumerate(folders):
        values = {f"weight{n}": torch.full((300,), float(number)) for n in range(3)}
        with checkpoints.replacing(folder) as path:
            writer = dcp.FileSystemWriter(path, thread_count=3)
            dcp.save(values, storage_writer=writer, no_dist=True)
    names = sorted(path.name for path in first.iterdir() if path.name != LIST)
    assert len(names) == 4
    for name in names[:count]:
        shutil.copy(second / name, first)
    if count < len(names):
        with pytest.raises(CheckpointError, match="is not the file"):
            checkpoints.checked(first)
    else:
        assert checkpoints.checked(first) == first
        assert "all files are of a later save" in caplog.text


def test_the_only_file_of_a_checkpoint_must_be_its_own(tmp_path):
    name = "mp_rank_00/model_optim_rng.pt"
    with checkpoints.replacing(tmp_path / "model") as path:
        (path / name).parent.mkdir()
        torch.save({"iteration": 1}, path / name)
    torch.save({"iteration": 2}, tmp_path / "model" / name)
    with pytest.raises(CheckpointError, match="is not the file"):
        checkpoints.checked(tmp_path / "model")


def load_mixed(first: Path, second: Path, delayed: bool) -> list[tuple[str, str]]:
    """Save twice, load with each file of the other save, then as it was; return the errors."""
    training = Training(True, "muon")
    for number, folder in enumerate((first, second)):
        training.step(number + 1)
        folder.mkdir(exist_ok=True)
        torch.distributed.barrier()
        state = training.state(is_loading=False)
        options = {"async_sharded_save": True, "async_strategy": "mcore"} if delayed else {}
        request = checkpoints.save(state, folder, **options)
        if request is not None:
            request.execute_sync()
    errors = []
    weights = training.weights
    for name in sorted(path.name for path in first.iterdir() if path.name != LIST):
        mixed = first.with_name(f"with {name}")
        if torch.distributed.get_rank() == 0:
            shutil.copytree(first, mixed)
            shutil.copy(second / name, mixed / name)
        torch.distributed.barrier()
        if (first / name).read_bytes() == (second / name).read_bytes():
            continue
        try:
            checkpoints.load(training.state(is_loading=True), mixed)
        except CheckpointError as error:
            errors.append((name, str(error)))
    assert all(torch.equal(weights[name], now) for name, now in training.weights.items())
    # a program without this package has saved the whole checkpoint anew
    if torch.distributed.get_rank() == 0:
        shutil.copy(first / LIST, second)
    torch.distributed.barrier()
    checkpoints.load(training.state(is_loading=True), second)
    checkpoints.load(training.state(is_loading=True), first)
    dist_checkpointing.load(training.state(is_loading=False), str(first))
    return errors


@pytest.mark.parametrize("delayed", [False, True], ids=["at once", "asynchronous"])
def test_a_program_that_saves_with_it_is_told(tmp_path, delayed):
    folders = tmp_path / "first", tmp_path / "second"
    errors, others = run_ranks(2, load_mixed, *folders, delayed, timeout=120)
    assert errors == others
    assert {"__0_0.distcp", "__1_0.distcp"} <= {name for name, _ in errors}
    assert all(f"/{name}'" in error for name, error in errors)
