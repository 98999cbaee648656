"""Entry: ``python -m benchmarks.page``.

Reads docs/benchmarks/*.json and writes docs/benchmarks.md; a section whose figures are missing is
left out.
"""

import argparse
import json
from pathlib import Path

from benchmarks.page.markdown import prose
from benchmarks.page.sections import SECTIONS

DOCS = Path(__file__).resolve().parents[2] / "docs"

HEAD = """# Benchmarks

Written by `python -m benchmarks.page` from [raw figures](benchmarks/); `benchmarks/run_all.sh`
measures everything again on your machine (`--only NAME` one of them). Ours and its peer run in turn
in the same processes; ratios are medians, pairwise, with quartiles."""

TAIL = """Elsewhere: [balance](balance.md), [waves and off-loading](storage.md#working-memory)."""


def page(figures: Path) -> str:
    """Return the page of a folder of figures."""
    parts = [prose(HEAD)]
    for file, write in SECTIONS:
        path = figures / file
        if path.exists():
            parts.append(write(json.loads(path.read_text())))
    return "\n".join([*parts, prose(TAIL)])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.page", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument("--figures", type=Path, default=DOCS / "benchmarks", help="their folder")
    parser.add_argument("--write", type=Path, default=DOCS / "benchmarks.md", help="the page")
    args = parser.parse_args()
    args.write.write_text(page(args.figures))


if __name__ == "__main__":
    main()
