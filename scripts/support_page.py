"""Makes docs/reference/support.md from docs/reference/support.yaml.

``python -m scripts.reference_pages`` writes the page.
"""

import textwrap
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "reference" / "support.yaml"
STATUSES = ("yes", "raises an error", "not tested", "does not apply")
HEAD = """\
# Support matrix

Look up here whether your optimizer works with your parallel layout. The last column names the
tests that show it.

* **yes**: a test runs it on real processes, on Megatron-Core's own model and wrappers.
* **raises an error**: building the optimizer or loading the checkpoint raises an error.
* **not tested**: it may work. Try it at a small size first.
* **does not apply**: this layout does not have the feature.

"Distributed optimizer" is `--use-distributed-optimizer`: each data-parallel rank keeps a part of
the optimizer state. "Replicated" is without it: each keeps the whole state of its tensor-parallel
shard. [Parallelism](../explanation/parallelism.md) explains both.

All tests run on CPUs with gloo. [The GPU check](benchmarks.md#on-a-gpu) has run on one H100. No row
is tested with NCCL between GPUs, Transformer Engine's layers, fp8, several machines, or context
parallelism on GPUs.
"""


def page() -> str:
    """Return the whole page.

    Raises:
        ValueError: If a row has an unknown status or names a test that does not exist.
    """
    # as text: "yes" would be a boolean
    sections = yaml.load(DATA.read_text(), yaml.BaseLoader)
    return "\n".join([HEAD, *map(_of_section, sections)])


def _of_section(section: dict[str, Any]) -> str:
    columns = [*section["columns"], "Test"]
    lines = [f"## {section['title']}", ""]
    if "text" in section:
        lines += [textwrap.fill(section["text"], 118), ""]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in section["rows"]:
        _check(row)
        tests = ", ".join(f"`tests/{test}`" for test in row["tests"])
        where = [row["where"]] if "where" in row else []
        cells = [row["what"], *where, *row["status"], tests or "-"]
        if len(cells) != len(columns):
            raise ValueError(f"{row['what']}: has {len(cells)} cells for {len(columns)} columns")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _check(row: dict[str, Any]) -> None:
    for status in row["status"]:
        if not status.startswith(STATUSES):
            raise ValueError(f"{row['what']}: {status!r} begins with none of {STATUSES}")
    for test in row["tests"]:
        if not (ROOT / "tests" / test).is_file():
            raise ValueError(f"{row['what']}: there is no tests/{test}")
    if not row["tests"] and {*row["status"]} != {"not tested"}:
        raise ValueError(f"{row['what']}: name the test that shows it")
