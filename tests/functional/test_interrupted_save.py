"""A save over a complete checkpoint is interrupted; the next load gets the complete one."""

import shutil
from pathlib import Path

import pytest
import torch
from megatron.training import checkpointing

from tests.functional.saved_states import tensors_in
from tests.functional.script import TINY, _run_once
from tests.harness import run_ranks

MUON = ["--optimizer", "muon", "--use-distributed-optimizer", "--train-iters", "2"]


def saved(flags: list[str], form: str) -> str:
    """Save; interrupted on rank 1 in the middle if ``form`` is given."""
    owner, name = {
        "torch_dist": (checkpointing.dist_checkpointing, "save"),
        "torch": (torch, "save"),
    }.get(form, (checkpointing, ""))
    original = getattr(owner, name, None)

    def interrupted(*args, **kwargs):
        original(*args, **kwargs)
        if form == "torch_dist":
            (Path(args[1]) / "metadata.json").unlink(missing_ok=True)
        raise KeyboardInterrupt

    if form:
        setattr(owner, name, interrupted)
    try:
        _run_once(flags)
    except BaseException as error:
        return type(error).__name__
    finally:
        if form:
            setattr(owner, name, original)
    return ""


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_the_complete_checkpoint_is_loaded(tmp_path, form):
    folder, copied = tmp_path / "run", tmp_path / "copy"
    saving = [*TINY, *MUON, "--ckpt-format", form, "--save", str(folder), "--save-interval", "2"]
    assert run_ranks(1, saved, saving, "", cpu=False, timeout=240) == [""]
    shutil.copytree(folder, copied)
    again = [*saving, "--seed", "7"]
    assert run_ranks(1, saved, again, form, cpu=False, timeout=240) != [""]
    resumed = [*TINY, *MUON, "--ckpt-format", form, "--load", str(folder)]
    assert run_ranks(1, saved, resumed, "", cpu=False, timeout=240) == [""]
    names = sorted(p.relative_to(copied) for p in copied.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    for name in names:
        assert (folder / name).read_bytes() == (copied / name).read_bytes(), name
    if form == "torch_dist":
        assert tensors_in(folder / "iter_0000002")
