"""A missing, damaged or foreign file of a checkpoint is found before anything is loaded.

One of another save is noticed, although it has the same name, size and kinds of content.
"""

import itertools
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from torch import distributed
from torch.distributed.checkpoint.metadata import Metadata

from megatron_eopt import checkpoints
from megatron_eopt.base.agreement import CheckpointError, gather_objects
from megatron_eopt.guard.contents import CONFIG, METADATA, RANK_FILE, read_metadata
from megatron_eopt.guard.files import (
    LIST,
    _share,
    _tensors_in,
    check,
    fingerprint,
    fingerprints_of,
    is_complete,
    is_part_of_a_checkpoint,
    write_list,
)
from tests.harness.each_rank import on_ranks
from tests.unit.checkpoint.test_pieces import Training

RANK_FILES = [f"mp_rank_0{rank}/{RANK_FILE}" for rank in range(2)]
TENSORS = "__0_0.distcp"
FILES = {
    "torch": RANK_FILES,
    "dcp": [METADATA, TENSORS],
    "torch_dist": [CONFIG, METADATA, TENSORS],
    "zarr": [CONFIG],  # the rest is its own
}


def write(folder: Path, form: str) -> None:
    """Write a checkpoint and its list."""
    folder.mkdir()
    for name in RANK_FILES if form == "torch" else ():
        (folder / name).parent.mkdir()
        torch.save({"model": torch.ones(3000)}, folder / name)
    if METADATA in FILES[form]:
        tensors = {"a": torch.ones(3000), "b": torch.ones(3000)}
        dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    if CONFIG in FILES[form]:
        (folder / CONFIG).write_text(json.dumps({"sharded_backend": form}))
    if form == "torch_dist":
        # as megatron-core does, leave out how keys are nested
        metadata = read_metadata(folder)
        metadata.planner_data = None
        (folder / METADATA).write_bytes(pickle.dumps(metadata))
    write_list(folder, fingerprints_of(folder) or {"its own": "fingerprint"})


@pytest.mark.parametrize("form", FILES)
def test_a_checkpoint_needs_all_files_of_its_format(tmp_path, form):
    folder = tmp_path / "model"
    assert is_complete(folder) is False
    with pytest.raises(CheckpointError, match="does not exist"):
        check(folder)
    write(folder, form)
    assert is_complete(folder)
    check(folder, every_byte=True)
    for name in FILES[form]:
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        assert not is_complete(folder)
        with pytest.raises(CheckpointError):
            check(folder)
        (folder / name).write_bytes(content)
    # other programs write no list
    (folder / LIST).unlink()
    assert is_complete(folder)
    check(folder)


def at(place: int) -> Callable[[Path], None]:
    """Return what changes a byte of a file; one before its end if the place is negative."""

    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(content)

    return change


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def write_text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


@pytest.mark.parametrize(
    ("form", "name", "damage", "said"),
    [
        *(("torch", name, cut, "cannot be read") for name in RANK_FILES),
        ("dcp", METADATA, cut, "cannot be read"),
        ("torch_dist", CONFIG, Path.unlink, "lacks the file"),
        (
            "torch_dist",
            CONFIG,
            write_text('{"sharded_backend": "torch_dist", "by": "another"}'),
            "is not the file",
        ),
        ("dcp", TENSORS, cut, r"has [\d,]+ of [\d,]+ bytes"),
        # the first and the last record of the tensors
        ("dcp", TENSORS, at(0), "does not contain the tensors"),
        ("dcp", TENSORS, at(-22), "does not contain the tensors"),
        *(
            ("dcp", LIST, write_text(text), "cannot be read")
            for text in ("", "{}", "[]", '["a"]', '{"a": ', "0")
        ),
    ],
)
def test_a_damaged_file_is_named(tmp_path, form, name, damage, said):
    folder = tmp_path / "model"
    write(folder, form)
    damage(folder / name)
    with pytest.raises(CheckpointError, match=said) as refused:
        check(folder)
    refused.match(name)


@pytest.mark.parametrize(("form", "name"), [("torch", RANK_FILES[1]), ("dcp", TENSORS)])
def test_a_changed_value_is_found_only_if_every_byte_is_read(tmp_path, form, name):
    folder = tmp_path / "model"
    write(folder, form)
    for place in (6000, -6000):
        at(place)(folder / name)
        assert checkpoints.checked(folder) == folder
        with pytest.raises(CheckpointError, match=f"/{name}.*wrong bytes"):
            checkpoints.checked(folder, every_byte=True)
        at(place)(folder / name)
    assert checkpoints.checked(folder, every_byte=True) == folder


def test_old_files_of_torch_have_no_checksums(tmp_path):
    path = tmp_path / RANK_FILES[0]
    path.parent.mkdir()
    torch.save({"model": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    check(tmp_path, every_byte=True)


def test_tensors_are_in_the_order_of_their_places():
    def item(path: str, offset: int, **more: object) -> SimpleNamespace:
        return SimpleNamespace(relative_path=path, offset=offset, length=5, **more)

    items = [
        item("a", 10),
        item("b", 0, transform_descriptors=None),
        item("a", 0),
        # a compressed tensor does not start and end as torch writes it
        item("c", 0, transform_descriptors=["zstd"]),
    ]
    metadata = Metadata({}, storage_data=dict(enumerate(items)))
    assert _tensors_in(metadata) == {"a": ((0, 5), (10, 5)), "b": ((0, 5),)}


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("small", [(), (METADATA,), (METADATA, CONFIG)], ids=len)
def test_ranks_share_the_files(world, small):
    files = dict.fromkeys(small, ()) | {f"__{n}_0.distcp": ((0, 9),) for n in range(6)}
    assert sorted(_share(files)) == sorted(files)
    shares = []
    for rank in range(world):
        ranks = {"get_rank": lambda rank=rank: rank, "get_world_size": lambda: world}
        with mock.patch.multiple(distributed, is_initialized=lambda: True, **ranks):
            shares.append(_share(files))
    assert sorted(itertools.chain(*shares)) == sorted(files)
    # rank 0 has read the metadata
    assert METADATA in shares[0] or METADATA not in files
    numbers = [sum(bool(files[name]) for name in share) for share in shares]
    assert max(numbers) - min(numbers) <= 1


@pytest.mark.parametrize(
    ("name", "is_part"),
    [
        *((name, True) for name in (METADATA, CONFIG, LIST, TENSORS, "mp_rank_00", "common.pt")),
        *((name, False) for name in ("tokenizer.json", "model.pt", "distcp", "rank_00")),
    ],
)
def test_what_belongs_to_a_checkpoint(name, is_part):
    assert is_part_of_a_checkpoint(Path("run", "iter_0000002", name)) == is_part


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


@pytest.mark.parametrize("delayed", [False, True], ids=["at once", "asynchronous"])
@on_ranks(2, timeout=120)
def test_a_program_that_saves_with_it_is_told(tmp_path, delayed):
    """Save twice, load with each file of the other save, then as it was."""
    first, second = tmp_path / "first", tmp_path / "second"
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
    assert gather_objects(errors) == [errors, errors]
    assert {"__0_0.distcp", "__1_0.distcp"} <= {name for name, _ in errors}
    assert all(f"/{name}'" in error for name, error in errors)
