"""Figures say what they are of."""

import json
from pathlib import Path

from benchmarks.about import about, publish, table


def test_figures_name_machine_and_packages(tmp_path: Path) -> None:
    found = about()
    assert found["machine"]
    assert found["cores"] >= 1
    assert {"torch", "megatron-core", "emerging-optimizers"} <= found.keys()
    publish({"steps": [1.5]}, found, tmp_path / "figures.json")
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written == {"about": found, "steps": [1.5]}


def test_a_table_has_a_rule() -> None:
    assert table("a | b:", [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |"
