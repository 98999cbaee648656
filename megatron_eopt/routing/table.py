"""The routing table: parameter, shape, optimizer, split, learning rate, weight decay, why."""

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_eopt.matrices import Split
from megatron_eopt.routing.groups import Group
from megatron_eopt.settings.settings import RunSettings

_COLUMNS = ("parameter", "shape", "optimizer", "split", "lr", "weight decay", "why")


def format_groups(
    groups: Iterable[Group], splits: Mapping[Any, Split], settings: RunSettings
) -> str:
    """Return a Markdown table of this rank's parameters, in model order.

    ``splits`` are those of fused weights.
    """
    rows = []
    for group in groups:
        values: dict[str, Any] = dict(group.key.values)
        decay = settings.weight_decay * values.get("wd_mult", 1.0)
        rate = values.get("max_lr", settings.lr)
        rates = ("" if rate is None else f"{rate:g}", f"{decay:g}")
        for route in group.members:
            item = route.parameter
            shape = " x ".join(map(str, item.shape)) + (" (expert)" if item.is_expert else "")
            cells = (item.name, shape, route.optimizer, _describe(splits.get(item.param)))
            rows.append((item.order, (*cells, *rates, route.why)))
    cells_of = [row for _, row in sorted(rows)]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *cells_of, strict=True)]
    lines = [_COLUMNS, ["-" * width for width in widths], *cells_of]
    padded = (map(str.ljust, line, widths) for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in padded)


def _describe(split: Split | None) -> str:
    """Return the parts of a split, for example ``qkv: q 64 x 32, k 32 x 32, v 32 x 32``."""
    if split is None:
        return "-"
    sizes = ((p.name, *([p.count] if p.count > 1 else []), *p.shape) for p in split.parts)
    parts = (f"{name} {' x '.join(map(str, numbers))}" for name, *numbers in sizes)
    return f"{split.kind}: " + ", ".join(parts)
