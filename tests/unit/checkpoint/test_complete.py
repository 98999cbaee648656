"""A damaged checkpoint is refused by its file's name, and an overwritten one survives a kill."""

import shutil
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from torch.distributed import checkpoint

from megatron_eopt import ConfigurationError
from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.checkpoint.complete import (
    TRACKER,
    forget_aside,
    format_of,
    latest,
    restore,
    set_aside,
)
from megatron_eopt.explain import explain
from tests.harness import run_ranks

FORMATS = ("torch", "torch_dist", "torch_dcp")


def write(form: str, folder: Path, value: float = 1.0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weight = torch.full((64, 64), value)
    if form == "torch":
        for rank in range(2):
            place = folder / f"mp_rank_0{rank}"
            place.mkdir(exist_ok=True)
            torch.save({"model": weight, "optimizer": {}}, place / "model_optim_rng.pt")
    elif form == "torch_dcp":
        checkpoint.save({"model": {"weight": weight}}, checkpoint_id=folder, no_dist=True)
    else:
        entry = ShardedTensor.from_rank_offsets("weight", weight)
        dist_checkpointing.save({"model": {"weight": entry}, "iteration": 1}, str(folder))


def write_all(folder: str) -> None:
    for form in FORMATS:
        write(form, Path(folder, form))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(1, write_all, str(folder))
    return folder


DAMAGES = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "garbage": lambda path: path.write_bytes(b"\x00garbage" * 3),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damaged_file_is_named(saved, tmp_path, form, damage):
    files = [p.relative_to(saved / form) for p in (saved / form).rglob("*") if p.is_file()]
    assert len(files) >= 2
    assert format_of(saved / form) == form
    for number, name in enumerate(files):
        folder = Path(shutil.copytree(saved / form, tmp_path / str(number)))
        DAMAGES[damage](folder / name)
        if damage == "missing" and form == "torch":
            continue  # files of ranks that need not exist
        with pytest.raises(CheckpointError) as error:
            format_of(folder)
        assert name.name in str(error.value) or "no complete checkpoint" in str(error.value)
        with pytest.raises(ConfigurationError) as other:
            explain(folder)
        assert str(other.value) == str(error.value)


@pytest.mark.parametrize("text", ["", "\n", "ten", "-3", "7"])
def test_a_tracker_file_that_names_no_checkpoint_is_refused(tmp_path, text):
    assert latest(tmp_path) is None
    (tmp_path / TRACKER).write_text(text)
    with pytest.raises(CheckpointError, match=TRACKER):
        latest(tmp_path)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("files", [0, 1, 2])
def test_an_unfinished_save_never_mixes_with_the_checkpoint_before(saved, tmp_path, form, files):
    folder = Path(shutil.copytree(saved / form, tmp_path / "iter_0000001"))
    before = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    set_aside(folder)
    assert not folder.exists()
    # a save that is killed after some of its files, the metadata not among them
    folder.mkdir()
    for name in sorted(str(name) for name in before if "metadata" not in str(name))[:files]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"new")
    # another attempt is killed, too
    set_aside(folder)
    folder.mkdir(exist_ok=True)
    assert restore(folder)
    after = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert after == before
    assert not restore(folder)


@pytest.mark.parametrize("form", FORMATS)
def test_a_finished_save_replaces_the_checkpoint_before(saved, tmp_path, form):
    folder = Path(shutil.copytree(saved / form, tmp_path / "iter_0000001"))
    (folder / "left over").touch()
    set_aside(folder)
    shutil.copytree(saved / form, folder)
    forget_aside(folder)
    assert not restore(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000001"]
    assert not (folder / "left over").exists()


@pytest.mark.parametrize("form", ["torch_dist", "torch_dcp"])
def test_a_save_in_the_background_that_has_finished_is_kept(saved, tmp_path, form):
    folder = Path(shutil.copytree(saved / form, tmp_path / "iter_0000001"))
    set_aside(folder)
    shutil.copytree(saved / form, folder)
    (folder / "new").touch()
    assert not restore(folder)
    assert (folder / "new").exists()
