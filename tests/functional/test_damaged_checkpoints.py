"""A checkpoint with a missing, damaged or foreign file is refused by the trainer and ``explain``.

A foreign file is another file of the same save, or the one of the same name of another save.
"""

import itertools
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.guard.files import LIST
from megatron_eopt.tools.explain import TRACKER, explain
from tests.functional.formats import FORMATS
from tests.functional.script import TINY, _run_once, losses, save, train
from tests.harness import RankError, run_ranks
from tests.harness.long_results import record_faults
from tests.harness.tiers import mostly_long

DAMAGES = {
    "missing": lambda path: path.unlink(missing_ok=True),
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    # of the same length
    "garbage": lambda path: path.write_bytes(b"\x13" * path.stat().st_size),
}


def exchange(first: Path, second: Path) -> None:
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def faults_in(run: Path) -> Iterator[tuple[set[str], str, Callable[[Path], object]]]:
    """Yield faults of one file or two: their names, the fault, and what does it to a copy."""
    tracker, folder = run / TRACKER, run / "iter_0000002"
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in (tracker, *files):
        own = path.relative_to(run)
        for name, damage in DAMAGES.items():
            # a checkpoint of megatron-core alone has no fingerprints
            if (path.name, name) != (LIST, "missing"):
                yield {path.name}, name, lambda copy, own=own, damage=damage: damage(copy / own)
    for path in files:
        name, other = path.relative_to(folder), run / "iter_0000001" / path.relative_to(folder)
        # with those of another save, all files are as if a program had written them anew
        if other.read_bytes() != path.read_bytes() and path.name != LIST:
            to, found = path.relative_to(run), {path.name}
            yield found, "foreign", lambda copy, to=to, other=other: shutil.copy(other, copy / to)
    for pair in itertools.combinations(files, 2):
        own = [path.relative_to(run) for path in pair]
        names = {path.name for path in pair}
        yield names, "swapped", lambda copy, own=own: exchange(*(copy / path for path in own))


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
                errors.append("loaded")
            except (Exception, SystemExit) as error:
                errors.append(f"{type(error).__name__}: {error}")
        run.load = good
        return checkpointing.load_checkpoint(*args, **kwargs)

    with mock.patch.object(training, "load_checkpoint", load):
        printed = _run_once(flags)
    return errors, printed


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("form", mostly_long(FORMATS, "torch_dist"))
def test_every_fault_of_every_file_is_refused(tmp_path, form, record_property):
    good = tmp_path / "good"
    save(good, *FORMATS[form], interval=1)
    copies = []
    for names, fault, inflict in faults_in(good):
        copy = tmp_path / "copies" / str(len(copies))
        shutil.copytree(good, copy)
        inflict(copy)
        copies.append((names, fault, copy))
    flags = [*TINY, *FORMATS[form], "--train-iters", "3", "--override-opt_param-scheduler"]
    flags += ["--load", str(good)]
    folders = [str(folder) for *_, folder in copies]
    (errors, _), (others, printed) = run_ranks(2, load_each, flags, folders, cpu=False, timeout=900)
    assert errors == others
    wrong = []
    for (names, fault, folder), error in zip(copies, errors, strict=True):
        named = any(name in error for name in (*names, "neither .metadata nor mp_rank_*"))
        if not (error.startswith("CheckpointError: ") and named):
            wrong.append((names, fault, error[:200]))
        try:
            told = f"explained {explain(folder).iteration}"
        except ConfigurationError as refused:
            told = f"CheckpointError: {refused}"
        except Exception as raw:
            told = f"{type(raw).__name__}: {raw}"
        # a run that is not given a step says so
        if not told.startswith("CheckpointError: ") or (TRACKER not in names and told != error):
            wrong.append((names, fault, f"explain: {told[:200]}"))
    assert not wrong
    for fault, number in Counter(fault for _, fault, _ in copies).items():
        outcome = Counter({"stopped on all ranks, nothing changed": number})
        record_faults(f"file of a checkpoint: {fault}", outcome, record_property)
    # nothing has been loaded from them
    assert losses(printed) == losses(train(*flags[len(TINY) :], timeout=300))


def test_a_folder_of_torch_dist_keeps_its_name(tmp_path):
    save(tmp_path, *FORMATS["torch_dist"])
    (tmp_path / "iter_0000002" / "metadata.json").unlink()
    with pytest.raises(RankError, match=r"metadata\.json") as refused:
        train(*FORMATS["torch_dist"], "--load", str(tmp_path), timeout=300)
    assert "torch_dcp" not in str(refused.value)


@pytest.mark.long
def test_a_step_is_loaded_without_a_tracker(tmp_path):
    save(tmp_path, *FORMATS["torch_dist"], interval=1)
    flags = [*FORMATS["torch_dist"], "--override-opt_param-scheduler", "--load", str(tmp_path)]
    for damage in DAMAGES.values():
        damage(tmp_path / TRACKER)
        output = train(*flags, "--ckpt-step", "1", timeout=300)
        assert re.search(r"successfully loaded checkpoint .* at iteration 1", output)
        (tmp_path / TRACKER).write_text("2")
