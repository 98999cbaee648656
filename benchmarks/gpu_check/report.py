"""Report the results of all sections, as a file and as a table."""

import json
from pathlib import Path
from typing import Any

from benchmarks.files import write_whole
from benchmarks.gpu_check.runner import Document
from benchmarks.predicted import HEAD, rows

_COLORS = {"passed": "green", "failed": "red", "skipped": "yellow", "not run": "yellow"}


def write(path: Path, machine: Document, sections: dict[str, Document]) -> None:
    """Write all results and the machine's description to a JSON file."""
    shown = {
        name: {key: value for key, value in found.items() if key != "basis"}
        for name, found in sections.items()
    }
    write_whole(path, json.dumps({"machine": machine, "sections": shown}, indent=1) + "\n")


def show(machine: Document, sections: dict[str, Document]) -> None:
    """Print a table of sections, and those of back ends and of predictions if measured."""
    from rich.console import Console
    from rich.table import Table

    # logs have no terminal width
    console = Console(width=None if Console().is_terminal else 140)
    table = Table("section", "result", "seconds", "found", title=_title(machine))
    for name, found in sections.items():
        status = found["status"] + (" (before)" if found.get("kept") else "")
        color = _COLORS[found["status"]]
        told = found.get("problems") or [found.get("skipped") or found["headline"]]
        text = "\n".join(_short(line) for line in told)
        table.add_row(name, f"[{color}]{status}[/]", f"{found['seconds']:.0f}", _plain(text))
    console.print(table)
    backends = sections.get("newton_schulz", {}).get("figures", {}).get("rows", [])
    if backends:
        console.print(_of_backends(backends))
    if predicted := rows(sections):
        columns = [name.strip().rstrip(":") for name in HEAD.split("|")]
        times = Table(*columns, title="Predicted for an H100 at full size, and measured here")
        for row in predicted:
            times.add_row(*map(_plain, row))
        console.print(times)


def _title(machine: Document) -> str:
    gpus = machine["gpus"]
    where = f"{len(gpus)} x {gpus[0]['name']}" if gpus else "CPU"
    driver = f", driver {machine['driver']}" if machine["driver"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    commit = machine["commit"] or f"sources {machine['sources']}"
    return _plain(f"{where}{driver}; {versions}; {commit}")


def _of_backends(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    names = ("back end", "algorithm", "matrices", "precision", "ms", "TFLOP/s", "deviation", "")
    table = Table(*names, title="Newton-Schulz (TFLOP/s: FLOPs of the standard form / time)")
    for row in rows:
        figures = [_number(row.get(key)) for key in ("milliseconds", "tflops", "deviation")]
        told = _plain(_short(row.get("note", "")))
        table.add_row(
            row["backend"], row["algorithm"], row["matrices"], row["precision"], *figures, told
        )
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:300]}..."


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
