"""What counted bytes and FLOPs predict for an H100, beside what `gpu_check` measured on a GPU.

It needs the standard library only, since `gpu_check` reports without torch.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"

FLOPS, MEMORY = 660e12, 2.8e12
"""FLOP/s and bytes/s that an H100 has reached: in 8192 x 28672 iterations, and with copies."""

ITEMS = {
    "matrix products": ("orthogonalization",),
    "copies of their addends": ("addends",),
    "gradient norm": ("norm", "clipping"),
    "Muon: directions": ("directions",),
    "Muon: normalization": ("normalization",),
    "Muon: copies of Q, K and V": ("exchange",),
    "Muon: weights": ("weights",),
    "Adam": ("update",),
}
"""Rows of the prediction, and the phases that they consist of."""

BESIDE = {"Adam": 1.0, "Muon: directions": 0.75}
"""Share of an item that a side stream runs beside products: all waves' directions but the first."""

KINDS = {
    "matrix products": "products",
    "copies of their addends": "copies",
    "Muon: copies of Q, K and V": "copies",
}
"""What a profiler's split calls an item; others are passes."""

MODELS = {"8 query groups": "8 query groups", "gpt": "16 query groups"}
"""Counted models that `gpu_check` times, and its names for them."""

HEAD = "what | part | predicted, ms: | measured, ms:"

_PLANNED = {"products": ("products",), "passes and copies": ("elements",), "step": ("step",)}
_REPLAYED = {"products": ("products",), "passes and copies": ("passes", "copies")}
_REPLAYED |= {"step": ("step",)}
_OTHERS = {"adam": "Adam", "stock": "Megatron's Muon"}


def milliseconds(phases: Mapping[str, Mapping[str, float]], names: tuple[str, ...]) -> float:
    """Return the predicted milliseconds of some phases."""
    found = [phases[name] for name in names if name in phases]
    return 1e3 * sum(one["bytes"] / MEMORY + one["flops"] / FLOPS for one in found)


def rows(sections: Mapping[str, Any]) -> list[list[str]]:
    """Return rows of predicted and measured milliseconds, of the sections that were measured."""
    return [*_of_step(_figures(sections, "step")), *_of_replay(_figures(sections, "replay"))]


def _figures(sections: Mapping[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = sections.get(name, {}).get("figures", {})
    return found


def _of_step(figures: Mapping[str, Any]) -> Iterator[list[str]]:
    counted = json.loads((FIGURES / "counted.json").read_text())["models"]
    for key, name in MODELS.items():
        # the first model's figures are those of the section
        measured = figures if key == next(iter(MODELS)) else figures.get(name, {})
        if "split" not in measured:
            continue
        predicted = dict.fromkeys(("products", "passes", "copies"), 0.0)
        for item, phases in ITEMS.items():
            # a split counts what runs beside products as products
            share = 1 - BESIDE.get(item, 0)
            kind = KINDS.get(item, "passes")
            predicted[kind] += share * milliseconds(counted[key]["phases"], phases)
        title = f"Muon's step, {name}"
        for kind, value in predicted.items():
            yield [title, kind, f"{value:.1f}", f"{measured['split'][kind]:.1f}"]
        yield [title, "idle", "", f"{measured['split']['idle']:.1f}"]
        whole = measured["milliseconds"]["muon"]
        yield [title, "step", f"{sum(predicted.values()):.1f}", f"{whole:.1f}"]


def _of_replay(figures: Mapping[str, Any]) -> Iterator[list[str]]:
    for title, found in figures.items():
        for part, names in _PLANNED.items():
            planned = sum(found["planned"][name] for name in names)
            real = sum(found["seconds"].get(name, 0.0) for name in _REPLAYED[part])
            yield [title, part, f"{1e3 * planned:.2f}", f"{1e3 * real:.2f}"]
        for key, name in _OTHERS.items():
            if "seconds" in found.get(key, {}):
                yield [title, f"step, {name}", "", f"{1e3 * found[key]['seconds']['step']:.2f}"]
