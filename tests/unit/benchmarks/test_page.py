"""The page of benchmarks says what the committed figures say."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.about import about
from benchmarks.page.__main__ import DOCS, page
from benchmarks.page.markdown import prose, table
from benchmarks.page.sections import SECTIONS


def test_the_committed_page_is_that_of_the_committed_figures() -> None:
    assert page(DOCS / "benchmarks") == (DOCS / "benchmarks.md").read_text()


@pytest.mark.parametrize("file", [file for file, _ in SECTIONS])
def test_a_section_without_figures_is_left_out(file: str, tmp_path: Path) -> None:
    shutil.copytree(DOCS / "benchmarks", tmp_path / "figures")
    (tmp_path / "figures" / file).unlink()
    whole, less = page(DOCS / "benchmarks"), page(tmp_path / "figures")
    assert len(less) < len(whole)
    assert set(less.splitlines()) <= set(whole.splitlines())


def test_figures_follow_into_the_page(tmp_path: Path) -> None:
    figures = json.loads((DOCS / "benchmarks" / "optimizer_step.json").read_text())
    figures["steps"][0]["gigaflops"] = 12345.67
    (tmp_path / "optimizer_step.json").write_text(json.dumps(figures))
    assert "| 12345.7 |" in page(tmp_path)


def test_prose_is_filled_and_a_table_has_a_rule() -> None:
    assert prose("## A\n\n  b\n  c\n\n" + "word " * 60).splitlines()[:3] == ["## A", "", "b c"]
    assert max(map(len, prose("word " * 60).splitlines())) <= 124
    assert table("a | b:", [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |\n"


def test_figures_name_machine_and_packages() -> None:
    found = about()
    assert found["machine"]
    assert found["cores"] >= 1
    assert {"torch", "megatron-core", "emerging-optimizers"} <= found.keys()
