"""Which folder is loaded after a crash, and what a manifest notices."""

import json
import logging
import shutil
from pathlib import Path

import pytest

from megatron_eopt.checkpoint_files.folders import (
    TRACKER,
    Choice,
    announce,
    choose,
    clear,
    forget_garbled_tracker,
    has_checkpoints,
    replace_tracker,
)
from megatron_eopt.checkpoint_files.manifest import (
    MANIFEST,
    Manifest,
    replace_file,
    verify,
    write_manifest,
)
from megatron_eopt.checkpoints import CheckpointError


def make(root: Path, iteration: int, *, manifest: bool = True) -> Path:
    """Make a finished folder of two files."""
    folder = root / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(bytes(range(100)))
    (folder / "metadata.json").write_text("{}")
    if manifest:
        write_manifest(folder, {"optimizer": "muon"})
    return folder


def track(root: Path, text: str) -> None:
    (root / TRACKER).write_text(text)


def test_the_tracker_decides(tmp_path, caplog):
    for iteration in (1, 2, 3):
        make(tmp_path, iteration)
    track(tmp_path, "2\n")
    assert choose(tmp_path) == Choice(2)
    assert not caplog.records


def test_nothing_there_means_nothing_to_load(tmp_path):
    assert choose(tmp_path / "new") is None
    assert choose(tmp_path) is None


@pytest.mark.parametrize("text", ["", "\x00\x00", "12x", "-1", None], ids=repr)
def test_without_a_tracker_the_newest_whole_one_is_loaded(tmp_path, text, caplog):
    for iteration in (9, 10):
        make(tmp_path, iteration)
    make(tmp_path, 11, manifest=False)
    if text is not None:
        track(tmp_path, text)
    with caplog.at_level(logging.WARNING):
        assert choose(tmp_path) == Choice(10)
    assert "Loading iter_0000010, the newest whole one" in caplog.text


def truncate(folder: Path) -> None:
    (folder / "__0_0.distcp").write_bytes(b"short")


def delete(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def unfinish(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    (folder / "metadata.json").unlink()


def garble(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"form": 1, "fi')


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "__0_0.distcp has 5 bytes instead of 100"),
        (delete, "__0_0.distcp is missing"),
        (unfinish, "iter_0000002 was not finished"),
        (garble, "is damaged"),
    ],
)
def test_a_folder_that_is_not_whole_is_passed_over(tmp_path, damage, reason, caplog):
    make(tmp_path, 1)
    damage(make(tmp_path, 2))
    track(tmp_path, "2")
    with caplog.at_level(logging.WARNING):
        assert choose(tmp_path) == Choice(1)
    assert reason in caplog.text


@pytest.mark.parametrize("text", ["2", "", None])
def test_checkpoints_none_of_which_is_whole_are_an_error(tmp_path, text):
    delete(make(tmp_path, 2))
    if text is not None:
        track(tmp_path, text)
    with pytest.raises(CheckpointError, match="no other checkpoint there is whole"):
        choose(tmp_path)


def kill_while_saving(root: Path, iteration: int) -> Path:
    """Leave what a save leaves that is killed before it is whole."""
    folder = root / f"iter_{iteration:07d}"
    announce(root, folder.name)
    (folder / "mp_rank_00").mkdir(parents=True)
    for name in ("__0_0.distcp", ".metadata", f".{MANIFEST}.partial", "mp_rank_00/some.pt"):
        (folder / name).write_bytes(b"half")
    return folder


def test_if_no_save_has_ever_finished_training_starts_with_a_warning(tmp_path, caplog):
    for iteration in (2, 4, 4):
        shutil.rmtree(tmp_path / f"iter_{iteration:07d}", ignore_errors=True)
        kill_while_saving(tmp_path, iteration)
    with caplog.at_level(logging.WARNING):
        assert choose(tmp_path) is None
    assert "No save has ever finished there: iter_0000002, iter_0000004" in caplog.text
    assert not has_checkpoints(tmp_path)


@pytest.mark.parametrize("sign", [TRACKER, f"iter_0000002/{MANIFEST}", "iter_0000001/__0_0.distcp"])
def test_whatever_may_be_a_checkpoint_is_not_passed_over(tmp_path, sign):
    kill_while_saving(tmp_path, 2)
    (tmp_path / sign).parent.mkdir(exist_ok=True)
    (tmp_path / sign).write_text("")
    assert has_checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match="no other checkpoint there is whole"):
        choose(tmp_path)


def test_once_a_save_has_finished_nothing_is_announced(tmp_path):
    kill_while_saving(tmp_path, 2)
    make(tmp_path, 3)
    replace_tracker(tmp_path / TRACKER, "3")
    announce(tmp_path, "iter_0000004")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000002",
        "iter_0000003",
        TRACKER,
    ]
    (tmp_path / TRACKER).unlink()
    assert choose(tmp_path) == Choice(3)


def test_a_tracker_without_its_folder_is_an_error(tmp_path):
    track(tmp_path, "5")
    with pytest.raises(CheckpointError, match="names iter_0000005, which does not exist"):
        choose(tmp_path)


def test_folders_of_other_savers_load(tmp_path, caplog):
    make(tmp_path, 1, manifest=False)
    make(tmp_path, 2, manifest=False)
    track(tmp_path, "1")
    assert choose(tmp_path) == Choice(1)
    track(tmp_path, "")
    assert choose(tmp_path) == Choice(2)
    (tmp_path / "iter_0000002" / "metadata.json").unlink()
    assert choose(tmp_path) == Choice(1)
    assert verify(tmp_path / "iter_0000001") is None
    assert "cannot be verified" in caplog.text


def test_what_a_saver_without_manifests_has_finished_last_is_loaded(tmp_path):
    make(tmp_path, 1)
    last = make(tmp_path, 2, manifest=False)
    track(tmp_path, "2")
    assert choose(tmp_path) == Choice(2)
    # where the tracker does not say so, it may be what a killed save has left
    track(tmp_path, "")
    assert choose(tmp_path) == Choice(1)
    track(tmp_path, "2")
    (last / "metadata.json").unlink()
    assert choose(tmp_path) == Choice(1)


def test_a_release_is_loaded(tmp_path):
    (tmp_path / "release").mkdir()
    make(tmp_path, 1)
    track(tmp_path, "release")
    assert choose(tmp_path) == Choice(0, release=True)


def test_every_flipped_bit_is_noticed(tmp_path):
    folder = make(tmp_path, 1)
    assert verify(folder) == Manifest.read(folder)
    for name in ("__0_0.distcp", "metadata.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
        with pytest.raises(CheckpointError, match=f"contents of its file {name} have changed"):
            verify(folder)
        verify(folder, digests=False)
        (folder / name).write_bytes(content)
    verify(folder)


def test_a_manifest_of_a_later_form_is_refused(tmp_path):
    folder = make(tmp_path, 1)
    content = json.loads((folder / MANIFEST).read_text())
    replace_file(folder / MANIFEST, json.dumps(content | {"form": 2}))
    with pytest.raises(CheckpointError, match="has form 2, and this release knows form 1"):
        verify(folder)


def test_what_a_killed_save_left_is_removed_and_nothing_else(tmp_path):
    folder = make(tmp_path, 1)
    (folder / "mp_rank_00").mkdir()
    for name in ("__7_0.distcp", ".metadata", "mp_rank_00/layer_wise_optimizer_3.pt"):
        (folder / name).write_text("left over")
    (folder / "notes.txt").write_text("mine")
    clear(folder)
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["notes.txt"]


def test_a_garbled_tracker_is_forgotten_before_saving(tmp_path):
    track(tmp_path, "")
    forget_garbled_tracker(tmp_path)
    assert not (tmp_path / TRACKER).exists()
    track(tmp_path, "3")
    forget_garbled_tracker(tmp_path)
    assert (tmp_path / TRACKER).read_text() == "3"
