"""A file of another save is noticed, although it has the same name, size and kinds of content."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing

from megatron_eopt import checkpoints
from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.guard.contents import CONFIG, METADATA, RANK_FILE
from megatron_eopt.guard.files import LIST, check, fingerprint, fingerprints_of, write_list
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


@pytest.mark.parametrize(
    ("listed", "found", "foreign"),
    [
        ("a", "a", 0),
        ("a", "b", 1),
        ("ab", "ab", 0),
        ("ab", "ac", 1),
        ("ab", "cb", 1),
        ("ab", "cd", "all"),
        ("ab", "ba", 2),
        ("ab", "ca", 2),
        ("abc", "abd", 1),
        ("abc", "ade", 2),
        ("abc", "deb", 3),
        ("abc", "def", "all"),
        # a file that the list does not have
        ("a", "ab", 0),
        ("a", "bc", 1),
    ],
)
def test_all_files_or_none_are_of_another_save(tmp_path, caplog, listed, found, foreign):
    """Each letter is the content of one more rank's file."""

    def write(contents: str) -> None:
        for rank, content in enumerate(contents):
            path = tmp_path / f"mp_rank_{rank:02d}" / RANK_FILE
            path.parent.mkdir(exist_ok=True)
            torch.save({"content": content}, path)

    write(listed)
    write_list(tmp_path, fingerprints_of(tmp_path))
    write(found)
    if foreign in (0, "all"):
        check(tmp_path)
    else:
        others = rf", and so are {foreign - 1} other files\." if foreign > 1 else r"\."
        with pytest.raises(CheckpointError, match=f"mp_rank_.* is not the file .* wrote{others}"):
            check(tmp_path)
    assert ("all files are of a later save" in caplog.text) == (foreign == "all")


def test_the_same_configuration_is_no_vote(tmp_path, caplog):
    for value in range(2):
        dcp.save({"weight": torch.full((3,), float(value))}, checkpoint_id=tmp_path, no_dist=True)
        (tmp_path / CONFIG).write_text('{"sharded_backend": "torch_dist"}')
        if not value:
            write_list(tmp_path, fingerprints_of(tmp_path))
            (metadata,) = tmp_path.glob(METADATA)
            before = metadata.read_bytes()
    check(tmp_path)
    assert "all files are of a later save" in caplog.text
    metadata.write_bytes(before)
    with pytest.raises(CheckpointError, match=r"distcp.* is not the file"):
        check(tmp_path)


@pytest.mark.parametrize(
    ("start", "slices", "expected"),
    [
        (b"PK\x03\x04", (), "fb341dba91800e1d6c84c961c6ef12f7"),
        (b"PK\x03\x04", ((0, 100),), "294da0687d5d0dde73d58b4459a4442f"),
        (b"plain", (), "48787814c2ce95b46c6fff606fa10790"),
        (b"PK\x03\x04", ((0, 7000), (7000, 2000)), "4e8ffca4e506af8f2c0db4d8dbb4d158"),
    ],
)
def test_lists_of_earlier_versions_stay_valid(tmp_path, start, slices, expected):
    path = tmp_path / "file"
    path.write_bytes((start + bytes(range(256)) * 36)[:9000])
    assert fingerprint(path, slices) == expected


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
