"""The routing table: parameter, shape, optimizer, split, learning rate, weight decay, why."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_eopt.matrices import Split
from megatron_eopt.routing.groups import Group

COLUMNS = ("parameter", "shape", "optimizer", "split", "lr", "weight decay", "why")


def routing_rows(
    groups: Iterable[Group], splits: Mapping[Any, Split], *, lr: float | None, weight_decay: float
) -> list[tuple[str, ...]]:
    """Return one row per parameter of this rank, in model order, under :data:`COLUMNS`.

    ``splits`` are those of fused weights, ``lr`` (the largest) and ``weight_decay`` the run's.
    """
    rows = []
    for group in groups:
        values: dict[str, Any] = dict(group.key.values)
        decay = weight_decay * values.get("wd_mult", 1.0)
        rate = values.get("max_lr", lr)
        settings = ("" if rate is None else f"{rate:g}", f"{decay:g}")
        for member in group.members:
            item = member.parameter
            shape = " x ".join(map(str, item.shape)) + (" (expert)" if item.is_expert else "")
            cells = (item.name, shape, member.optimizer, describe_split(splits.get(item.param)))
            rows.append((item.order, (*cells, *settings, member.why)))
    return [row for _, row in sorted(rows)]


def describe_split(split: Split | None) -> str:
    """Return the parts of a split, for example ``qkv: q 64 x 32, k 32 x 32, v 32 x 32``."""
    if split is None:
        return "-"
    sizes = ((p.name, *([p.count] if p.count > 1 else []), *p.shape) for p in split.parts)
    parts = (f"{name} {' x '.join(map(str, numbers))}" for name, *numbers in sizes)
    return f"{split.kind}: " + ", ".join(parts)


def format_table(rows: Sequence[Sequence[str]], header: Sequence[str] = COLUMNS) -> str:
    """Return ``rows`` as a Markdown table that is also readable as text."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    padded = (map(str.ljust, line, widths) for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in padded)
