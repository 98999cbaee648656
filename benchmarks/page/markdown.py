"""Pieces of a page in Markdown."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

_WIDTH = 124


def prose(text: str) -> str:
    """Return paragraphs filled to the width of the other pages."""
    paragraphs = [" ".join(part.split()) for part in text.strip().split("\n\n")]
    filled = [part if part.startswith(("#", "![")) else _fill(part) for part in paragraphs]
    return "\n\n".join(filled) + "\n"


def table(head: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; a column whose name ends in ``:`` has numbers."""
    names = [name.strip() for name in head.split("|")]
    rule = ["---:" if name.endswith(":") else "---" for name in names]
    lines = [[name.rstrip(":") for name in names], rule, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def machine(figures: dict[str, Any]) -> str:
    """Return what figures are of, in a sentence."""
    about = figures["about"]
    where = about.get("gpu") or f"{about['cores']} cores of an {about['machine']}"
    packages = [
        f"{name} {about[name]}"
        for name in ("torch", "megatron-core", "emerging-optimizers")
        if name in about
    ]
    commit = f", commit {about['commit']}" if about.get("commit") else ""
    busy = f", load {about['load']} before" if about.get("load") is not None else ""
    return f"On {where}{busy}; {', '.join(packages)}{commit}."


def quartiles(values: Sequence[float]) -> str:
    """Return three quartiles as a cell, the median first; nothing for none."""
    if not values:
        return ""
    low, middle, high = values
    return f"{middle:.2f} ({low:.2f} .. {high:.2f})"


def bullets(*items: str) -> str:
    """Return a list of filled items."""
    return "".join(f"{_fill(' '.join(item.split()), '* ')}\n" for item in items)


def _fill(text: str, first: str = "") -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )
