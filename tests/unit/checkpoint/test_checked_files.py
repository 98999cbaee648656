"""A missing or damaged file of a checkpoint is found before anything is loaded."""

import itertools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed
from torch.distributed.checkpoint.metadata import Metadata

from megatron_eopt import checkpoints
from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.guard.contents import CONFIG, METADATA, RANK_FILE, read_metadata
from megatron_eopt.guard.files import (
    LIST,
    _share,
    _tensors_in,
    check,
    fingerprints_of,
    is_complete,
    is_part_of_a_checkpoint,
    write_list,
)

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
        writer = dcp.FileSystemWriter(folder)
        dcp.save(
            {"a": torch.ones(3000), "b": torch.ones(3000)}, storage_writer=writer, no_dist=True
        )
    if CONFIG in FILES[form]:
        (folder / CONFIG).write_text(json.dumps({"sharded_backend": form}))
    if form == "torch_dist":
        forget_nesting(folder / METADATA)
    write_list(folder, fingerprints_of(folder) or {"its own": "fingerprint"})


def forget_nesting(path: Path) -> None:
    """Leave out how keys are nested, as megatron-core does."""
    metadata = read_metadata(path.parent)
    metadata.planner_data = None
    path.write_bytes(pickle.dumps(metadata))


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
