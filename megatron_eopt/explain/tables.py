"""Shows what a checkpoint holds, to people and to programs."""

import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_eopt.explain.contents import Contents, Layout
from megatron_eopt.explain.routes import UNKNOWN

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SETTINGS = (
    *("lr", "max_lr", "min_lr", "lr_mult", "weight_decay", "wd_mult"),
    *("momentum", "betas", "beta2", "step"),
)


def show(contents: Contents, console: Console) -> None:
    """Print tables of what a checkpoint holds."""
    console.print(Text(contents.folder, style="bold"))
    _show_facts(contents, console)
    if contents.optimizers:
        _show_optimizers(contents, console)
        _show_groups(contents, console)
    if contents.routes:
        columns = ("parameter", "number", "shape", "elements", "optimizer", "group", "state")
        _print(
            console,
            "Which optimizer steps which parameter",
            columns,
            (
                (
                    *(route.name, f"{route.count:,}", _shape(route.shape), f"{route.elements:,}"),
                    *(route.optimizer, route.group or "-", ", ".join(route.kinds) or "-"),
                )
                for route in contents.routes
            ),
        )
    rows = ((target.where, target.verdict, target.how) for target in contents.targets)
    _print(console, "Where it loads", ("into", "loads", "how"), rows)
    for note in contents.notes:
        console.print(Text(note))


def to_json(contents: Contents) -> str:
    """Return what a checkpoint holds as JSON, for programs."""
    return json.dumps(asdict(contents), indent=1, default=str)


def size_of(count: int) -> str:
    """Return a number of bytes in a unit of binary multiples."""
    value, unit = float(count), 0
    while value >= 1024 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    return f"{value:.4g} {_UNITS[unit]}"


def _show_facts(contents: Contents, console: Console) -> None:
    model, state = contents.model, contents.state
    rows = [
        ("format", contents.format),
        ("form of optimizer state", contents.form or UNKNOWN),
        ("iteration", UNKNOWN if contents.iteration is None else str(contents.iteration)),
        ("model", f"{size_of(model.bytes)}: {model.elements:,} in {model.tensors:,} tensors"),
        (
            "optimizer state",
            f"{size_of(state.bytes)}: {state.elements:,} in {state.tensors:,} tensors",
        ),
        ("other", size_of(contents.other_bytes)),
        ("written at", _layout(contents.layout)),
    ]
    _print(console, None, ("", ""), rows)


def _show_optimizers(contents: Contents, console: Console) -> None:
    rows = []
    for item in contents.optimizers:
        head = (item.name, f"{item.parameters:,}", f"{item.elements:,}")
        for state in item.states or (None,):
            tail = ("-", "-", "-")
            if state is not None:
                tail = (state.kind, ", ".join(state.dtypes), size_of(state.amount.bytes))
            rows.append((*head, *tail))
            head = ("", "", "")
    columns = ("optimizer", "parameters", "elements", "state", "dtype", "size")
    _print(console, "Optimizers", columns, rows)


def _show_groups(contents: Contents, console: Console) -> None:
    groups = [(item.name, group) for item in contents.optimizers for group in item.groups]
    found = [key for key in _SETTINGS if any(key in group.settings for _, group in groups)]
    rows = (
        (name, group.identity or "-", *(_number(group.settings.get(key)) for key in found))
        for name, group in groups
    )
    if groups:
        _print(console, "Parameter groups", ("optimizer", "group", *found), rows)


def _print(
    console: Console, title: str | None, columns: Iterable[str], rows: Iterable[Iterable[str]]
) -> None:
    table = Table(title=title, title_justify="left", show_header=title is not None)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        # names may have brackets, which are no markup
        table.add_row(*map(Text, row))
    console.print(table)


def _layout(layout: Layout) -> str:
    sizes = {field.name.replace("_", " "): getattr(layout, field.name) for field in fields(layout)}
    known = [f"{name} {size}" for name, size in sizes.items() if size is not None]
    lacking = [name for name, size in sizes.items() if size is None]
    return ", ".join(known) + (f"; {UNKNOWN}: {', '.join(lacking)}" if lacking else "")


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _number(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_number, value))
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
