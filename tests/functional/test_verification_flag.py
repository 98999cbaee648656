"""Files are verified where the command line asks for it, and nowhere else."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.functional.script import SCRIPT, TINY, _run_once
from tests.functional.test_launch import SCRIPT as UNMODIFIED
from tests.functional.test_launch import launched
from tests.harness import run_ranks

SAVING = "--optimizer muon --ckpt-format torch_dist --save-interval 1 --train-iters 1".split()


class _Opened:
    """Notes the files of a folder that this process opens for reading while it is on."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.names: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and self.folder is not None and isinstance(args[0], str | Path):
            path, mode = Path(args[0]), args[1] or "r"
            if self.folder in path.parents and "r" in mode and "+" not in mode:
                self.names.append(path.name)


def _save(script: str, folder: str, flags: list[str]) -> list[str]:
    opened = _Opened()
    opened.folder = Path(folder)
    arguments = [*TINY, *SAVING, "--save", folder, *flags]
    try:
        _run_once(arguments) if script == str(SCRIPT) else launched(script, *arguments)
    finally:
        opened.folder = None
    return [name for name in opened.names if name.endswith(".distcp")]


@pytest.mark.parametrize(
    ("script", "flags", "verified"),
    [
        pytest.param(UNMODIFIED, [], False, marks=pytest.mark.long),
        (UNMODIFIED, ["--verify-checkpoints"], True),
        (SCRIPT, [], True),
        pytest.param(SCRIPT, ["--no-verify-checkpoints"], False, marks=pytest.mark.long),
    ],
    ids=["launched", "launched, asked for", "our script", "our script, declined"],
)
def test_who_asks_for_verification_gets_it(tmp_path, script, flags, verified):
    read = run_ranks(2, _save, str(script), str(tmp_path), flags, cpu=False, timeout=180)
    written = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} < written
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert ("eopt_manifest.json" in written) == verified
    # each rank its own file once, or none at all
    assert read == ([["__0_0.distcp"], ["__1_0.distcp"]] if verified else [[], []])
