"""Entry: ``python -m benchmarks.checkpoint_files``."""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.about import about, publish
from benchmarks.checkpoint_files.measure import Figures, measure


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint_files",
        description=(
            "Save and load the state of a GPT with Muon (gloo processes on a CPU): without "
            "verification, with our manifest, and with megatron-core's; time it and count the "
            "bytes that are read."
        ),
    )
    parser.add_argument("--rounds", type=int, default=7, help="times that each saves and loads")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--folder", type=Path, help="where to save; default: a temporary folder")
    parser.add_argument("--timeout", type=float, default=560.0, help="seconds for all of it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds must be at least 2")
    before = about()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        figures = measure(
            args.ranks, args.layers, args.hidden, args.rounds, Path(folder), args.timeout
        )
    print(f"a checkpoint of {figures[0].checkpoint_bytes:,} bytes, {args.ranks} ranks\n")
    print(table(figures))
    result = {"ranks": args.ranks, "ways": [asdict(one) for one in figures]}
    publish(result, before, args.json)


def table(figures: Sequence[Figures]) -> str:
    """Return a Markdown table."""
    lines = [
        "| | | median s | x not verified | quartiles | read, in checkpoints | by one rank |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for one in figures:
        low, middle, high = one.ratios
        read, most = (
            count / one.checkpoint_bytes for count in (one.bytes_read, one.most_bytes_read)
        )
        cells = [one.what, one.way, f"{statistics.median(one.seconds):.2f}", f"{middle:.2f}"]
        cells += [f"{low:.2f} .. {high:.2f}", f"{read:.2f}", f"{most:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
