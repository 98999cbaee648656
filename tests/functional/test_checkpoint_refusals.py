"""The trainer and checkpoints that are damaged, unfinished or of another run."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.functional.script import TINY, _run_once, losses, train
from tests.harness import run_ranks

# the schedule of a longer run is another one
SHARDED = ["--use-distributed-optimizer", "--override-opt-param-scheduler"]
MUON = ["--optimizer", "muon", *SHARDED]
ADAM = ["--optimizer", "adam", *SHARDED]
TORCH = ["--ckpt-format", "torch", "--override-opt-param-scheduler"]
PER_RANK = ["--optimizer", "muon", "--tensor-model-parallel-size", "2", *TORCH]
TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "eopt_manifest.json"
TIMEOUT = 240.0


def _error_of(flags: list[str]) -> str:
    """Run the script; return what it raises, or "" and what it prints."""
    try:
        _run_once(flags)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused(folder: Path, *flags: str) -> str:
    """Let two ranks fail to load ``folder``; return the error, which both must raise alike."""
    before = contents(folder)
    arguments = [*TINY, "--train-iters", "3", *flags, "--load", str(folder)]
    errors = run_ranks(2, _error_of, arguments, cpu=False, timeout=TIMEOUT)
    assert errors[0] == errors[1]
    assert errors[0], "it was loaded"
    assert contents(folder) == before
    return errors[0]


def loaded(folder: Path, *flags: str) -> tuple[int, str]:
    """Train one further iteration; return which one was loaded, and what was printed."""
    output = train("--train-iters", "3", *flags, "--load", str(folder), timeout=TIMEOUT)
    found = re.search(r"successfully loaded checkpoint .* at iteration (\d+)", output)
    assert found, output
    assert losses(output)
    return int(found[1]), output


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def save(folder: Path, *flags: str) -> str:
    saving = ["--save", str(folder), "--save-interval", "1"]
    output = train("--train-iters", "2", *flags, *saving, timeout=TIMEOUT)
    assert (folder / TRACKER).read_text() == "2"
    return output


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Checkpoints of iterations 1 and 2."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder, *MUON)
    return folder


@pytest.fixture(scope="module")
def saved_by_rank(tmp_path_factory) -> Path:
    """The same in the format of one file per rank, at TP 2."""
    folder = tmp_path_factory.mktemp("saved_by_rank")
    save(folder, *PER_RANK)
    return folder


def copied(saved: Path, tmp_path: Path, *, only: bool = True) -> tuple[Path, Path]:
    """Copy checkpoints; return the folder and that of iteration 2, the only one if asked."""
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    if only:
        shutil.rmtree(folder / "iter_0000001")
    return folder, folder / "iter_0000002"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("__1_0.distcp", truncate, r"its file __1_0.distcp has \d+ bytes instead of \d+"),
        ("__0_0.distcp", Path.unlink, "its file __0_0.distcp is missing"),
        ("__1_0.distcp", flip, "the contents of its file __1_0.distcp have changed"),
        (".metadata", flip, "the contents of its file .metadata have changed"),
        ("metadata.json", flip, "the contents of its file metadata.json have changed"),
        (MANIFEST, truncate, "its eopt_manifest.json is damaged|the eopt_manifest.json of"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_damaged_files_are_refused(
    saved: Path, tmp_path: Path, name: str, damage: Callable[[Path], None], words: str
):
    folder, newest = copied(saved, tmp_path)
    damage(newest / name)
    assert re.search(words, refused(folder, *MUON))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--hidden-size", "32"], "was written by another model; tensors of another shape"),
        (["--num-layers", "3"], "was written by another model; tensors of another shape"),
        (["--qk-layernorm"], "lacks tensors that this run asks for: .*layernorm"),
    ],
    ids=["hidden size", "layers", "more tensors"],
)
def test_another_model_is_refused(saved, flags, words):
    assert re.search(words, refused(saved, *MUON, *flags))


def test_another_schedule_is_refused(saved):
    flags = [flag for flag in MUON if flag != "--override-opt-param-scheduler"]
    error = refused(saved, *flags)
    assert error.startswith("CheckpointError")
    assert "--override-opt-param-scheduler" in error


@pytest.mark.long
def test_an_optimizer_that_was_not_saved_is_refused(tmp_path):
    save(tmp_path, *PER_RANK, "--no-save-optim")
    error = refused(tmp_path, *PER_RANK)
    assert error.startswith("CheckpointError")
    assert "--no-load-optim" in error
    assert loaded(tmp_path, *PER_RANK, "--no-load-optim")[0] == 2


@pytest.mark.long
def test_a_model_with_fewer_tensors_is_refused(saved, tmp_path):
    wide = tmp_path / "wide"
    save(wide, *MUON, "--qk-layernorm")
    assert re.search("tensors that this one lacks|no optimizer of this run", refused(wide, *MUON))


@pytest.mark.parametrize("text", [pytest.param("", marks=pytest.mark.long), "2\x00garbage"])
def test_the_newest_whole_checkpoint_is_found(saved, tmp_path, text):
    folder, _ = copied(saved, tmp_path, only=False)
    (folder / TRACKER).write_text(text)
    assert loaded(folder, *MUON)[0] == 2
    (folder / TRACKER).unlink()
    truncate(folder / "iter_0000002" / "__1_0.distcp")
    assert loaded(folder, *MUON)[0] == 1


def test_no_whole_checkpoint_is_an_error_and_no_fresh_start(saved, tmp_path):
    folder, newest = copied(saved, tmp_path)
    (folder / TRACKER).write_text("")
    (newest / "__1_0.distcp").unlink()
    assert "no other checkpoint there is whole" in refused(folder, *MUON)


def test_without_checkpoints_training_starts(tmp_path):
    output = train("--train-iters", "1", *MUON, "--load", str(tmp_path / "none"))
    assert "will start from random" in output
    assert losses(output)


def test_files_without_a_manifest_load(saved, tmp_path):
    folder, newest = copied(saved, tmp_path)
    (newest / MANIFEST).unlink()
    assert loaded(folder, *MUON)[0] == 2


@pytest.mark.long
def test_verification_can_be_left_out(saved, tmp_path):
    folder, newest = copied(saved, tmp_path)
    content = json.loads((newest / MANIFEST).read_text())
    content["files"]["__1_0.distcp"]["sha256"] = "0" * 64
    (newest / MANIFEST).write_text(json.dumps(content))
    assert "have changed" in refused(folder, *MUON)
    assert loaded(folder, *MUON, "--no-verify-checkpoints")[0] == 2


def test_a_step_that_does_not_exist_is_refused(saved):
    assert "there is no such folder" in refused(saved, *MUON, "--ckpt-step", "7")
    assert loaded(saved, *MUON, "--ckpt-step", "1")[0] == 1


def test_an_unfinished_folder_does_not_disturb_saving(saved, tmp_path):
    folder, _ = copied(saved, tmp_path)
    killed = folder / "iter_0000003"
    killed.mkdir()
    for name in ("__7_0.distcp", ".metadata"):
        (killed / name).write_bytes(b"half")
    flags = ["--save", str(folder), "--save-interval", "1", "--save-retain-interval", "100"]
    assert loaded(folder, *MUON, *flags)[0] == 2
    assert (folder / TRACKER).read_text() == "3"
    files = json.loads((killed / MANIFEST).read_text())["files"]
    assert set(files) == {"__0_0.distcp", "__1_0.distcp", ".metadata", "metadata.json"}
    assert not (killed / "__7_0.distcp").exists()


@pytest.mark.long
def test_an_asynchronous_save_is_verified_too(tmp_path):
    asynchronous = ["--async-save", "--async-strategy", "mcore"]
    save(tmp_path, *MUON, *asynchronous)
    for iteration in (1, 2):
        assert (tmp_path / f"iter_000000{iteration}" / MANIFEST).exists()
    assert loaded(tmp_path, *MUON)[0] == 2
    flip(tmp_path / "iter_0000002" / "__0_0.distcp")
    assert "have changed" in refused(tmp_path, *MUON)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, r"its file mp_rank_01/model_optim_rng.pt has \d+ bytes instead of \d+"),
        (flip, "the contents of its file mp_rank_01/model_optim_rng.pt have changed"),
        (Path.unlink, "its file mp_rank_01/model_optim_rng.pt is missing"),
    ],
    ids=["truncated", "flipped", "deleted"],
)
def test_damaged_files_of_ranks_are_refused(saved_by_rank, tmp_path, damage, words):
    folder, newest = copied(saved_by_rank, tmp_path)
    damage(newest / "mp_rank_01" / "model_optim_rng.pt")
    assert re.search(words, refused(folder, *PER_RANK))


@pytest.mark.long
def test_files_of_ranks_load_at_their_layout_and_model_only(saved_by_rank, tmp_path):
    assert loaded(saved_by_rank, *PER_RANK)[0] == 2
    assert "written by another model" in refused(saved_by_rank, *PER_RANK, "--num-layers", "3")
    folder, newest = copied(saved_by_rank, tmp_path)
    shutil.rmtree(newest / "mp_rank_01")
    (newest / MANIFEST).unlink()
    words = "has no file mp_rank_01/model_optim_rng.pt, which this layout reads"
    assert words in refused(folder, *PER_RANK)


@pytest.mark.long
def test_files_of_another_optimizer_are_refused(tmp_path):
    save(tmp_path, "--optimizer", "adam", *SHARDED, *TORCH)
    flags = [*MUON, "--ckpt-format", "torch"]
    assert "no file mp_rank_00/layer_wise_optimizer_0.pt" in (error := refused(tmp_path, *flags))
    assert "with the optimizer" in error
    assert "--no-load-optim" in error
    assert loaded(tmp_path, *flags, "--no-load-optim")[0] == 2


@pytest.mark.parametrize(
    "present", [MUON, pytest.param(ADAM, marks=pytest.mark.long)], ids=["muon", "adam"]
)
def test_buckets_of_another_layout_are_refused(tmp_path, present):
    save(tmp_path, *ADAM)
    error = refused(tmp_path, *present, "--tensor-model-parallel-size", "2")
    assert re.search("dp_reshardable|dp_zero|buckets", error)
