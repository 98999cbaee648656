"""A checkpoint with a missing or damaged file is refused by the trainer and ``explain`` alike."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.tools.explain import TRACKER, explain
from tests.functional.formats import FORMATS, parameters
from tests.functional.script import TINY, _run_once, losses, train
from tests.harness import RankError, run_ranks

DAMAGES = {
    "missing": lambda path: path.unlink(missing_ok=True),
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    # of the same length
    "garbage": lambda path: path.write_bytes(b"\x13" * path.stat().st_size),
}


def save(folder: Path, flags: list[str], interval: int = 2) -> None:
    saving = ["--save", str(folder), "--save-interval", str(interval)]
    train(*flags, "--train-iters", "2", *saving, timeout=300)


def damaged_copies(run: Path, into: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield the file's name, the damage and the folder of copies with one damaged file."""
    files = [path for path in run.rglob("*") if path.is_file() and path.name != "progress.txt"]
    for number, path in enumerate(sorted(files)):
        for name, damage in DAMAGES.items():
            copy = into / f"{number}-{name}"
            shutil.copytree(run, copy)
            damage(copy / path.relative_to(run))
            yield path.name, name, copy


def load_each(flags: list[str], folders: list[str]) -> tuple[list[str], str]:
    """Let the trainer load folders in one process, then a good one; return errors and output."""
    from megatron.training import checkpointing, training

    errors = []

    def load(*args, **kwargs):
        run = checkpointing.get_args()
        good = run.load
        for run.load in folders:
            try:
                checkpointing.load_checkpoint(*args, **kwargs)
            except (Exception, SystemExit) as error:
                errors.append(f"{type(error).__name__}: {error}")
            else:
                errors.append("loaded")
        run.load = good
        return checkpointing.load_checkpoint(*args, **kwargs)

    with mock.patch.object(training, "load_checkpoint", load):
        printed = _run_once(flags)
    return errors, printed


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("form", parameters("torch_dist"))
def test_every_damage_of_every_file_is_refused(tmp_path, form):
    good = tmp_path / "good"
    save(good, FORMATS[form])
    copies = list(damaged_copies(good, tmp_path / "copies"))
    flags = [*TINY, *FORMATS[form], "--train-iters", "3", "--override-opt_param-scheduler"]
    flags += ["--load", str(good)]
    folders = [str(folder) for *_, folder in copies]
    (errors, _), (others, printed) = run_ranks(2, load_each, flags, folders, cpu=False, timeout=900)
    assert errors == others
    wrong = []
    for (file, damage, folder), error in zip(copies, errors, strict=True):
        named = file in error or "neither .metadata nor mp_rank_*" in error
        if not (error.startswith("CheckpointError: ") and named):
            wrong.append((file, damage, error[:200]))
        try:
            told = f"explained {explain(folder).iteration}"
        except ConfigurationError as refused:
            told = f"CheckpointError: {refused}"
        except Exception as raw:
            told = f"{type(raw).__name__}: {raw}"
        # a run that is not given a step says so
        if not told.startswith("CheckpointError: ") or (file != TRACKER and told != error):
            wrong.append((file, damage, f"explain: {told[:200]}"))
    assert not wrong
    # nothing has been loaded from them
    assert losses(printed) == losses(train(*flags[len(TINY) :], timeout=300))


def test_a_folder_of_torch_dist_keeps_its_name(tmp_path):
    save(tmp_path, FORMATS["torch_dist"])
    (tmp_path / "iter_0000002" / "metadata.json").unlink()
    with pytest.raises(RankError, match=r"metadata\.json") as refused:
        train(*FORMATS["torch_dist"], "--load", str(tmp_path), timeout=300)
    assert "torch_dcp" not in str(refused.value)


@pytest.mark.long
def test_a_step_is_loaded_without_a_tracker(tmp_path):
    save(tmp_path, FORMATS["torch_dist"], interval=1)
    flags = [*FORMATS["torch_dist"], "--override-opt_param-scheduler", "--load", str(tmp_path)]
    for damage in DAMAGES.values():
        damage(tmp_path / TRACKER)
        output = train(*flags, "--ckpt-step", "1", timeout=300)
        assert re.search(r"successfully loaded checkpoint .* at iteration 1", output)
        (tmp_path / TRACKER).write_text("2")
