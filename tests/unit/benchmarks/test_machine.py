"""Figures name the commit of the sources they are of."""

import subprocess
from pathlib import Path

import pytest

from benchmarks import machine


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository of one source and one figure, all of it committed."""
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    for name in ("source.py", "docs/figures.json"):
        (tmp_path / name).write_text("1\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        who = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *command], check=True)
    return tmp_path


def test_a_changed_figure_leaves_the_commit_as_it_is(repository: Path) -> None:
    (repository / "docs/figures.json").write_text("2\n")
    commit = machine.commit()
    assert len(commit) == 12
    assert set(commit) <= set("0123456789abcdef")


def test_a_changed_source_is_said(repository: Path) -> None:
    commit = machine.commit()
    (repository / "source.py").write_text("2\n")
    assert machine.commit() == f"{commit}-dirty"


def test_outside_of_git_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert machine.commit() == ""
