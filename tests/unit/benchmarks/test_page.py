"""The page of benchmarks says what the committed figures say."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.about import about
from benchmarks.page.__main__ import DOCS, page
from benchmarks.page.markdown import prose, table
from benchmarks.page.sections import SECTIONS

ROOT = DOCS.parent


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
    figures = json.loads((DOCS / "benchmarks" / "megatron_fsdp.json").read_text())
    for ranks in figures["ranks"].values():
        ours, theirs = ranks["times"]
        ranks["times"][theirs] = [7 * time for time in ranks["times"][ours]]
    (tmp_path / "megatron_fsdp.json").write_text(json.dumps(figures))
    assert page(tmp_path).count("7.00 (7.00 .. 7.00)") == len(figures["ranks"])


def test_prose_is_filled_and_a_table_has_a_rule() -> None:
    assert prose("## A\n\n  b\n  c\n\n" + "word " * 60).splitlines()[:3] == ["## A", "", "b c"]
    assert max(map(len, prose("word " * 60).splitlines())) <= 124
    assert table("a | b:", [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |\n"


def test_figures_name_machine_and_packages() -> None:
    found = about()
    assert found["machine"]
    assert found["cores"] >= 1
    assert {"torch", "megatron-core", "emerging-optimizers"} <= found.keys()


def test_an_unknown_benchmark_is_refused_with_the_names_there_are() -> None:
    command = [str(ROOT / "benchmarks" / "run_all.sh"), "--only", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nothing" in done.stderr
    assert "optimizer_step_fp32" in done.stderr
