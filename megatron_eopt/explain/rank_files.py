"""Checkpoints of format ``torch``: a folder ``mp_rank_*`` for each model-parallel rank.

Files are mapped into memory, so tensors that nobody looks into are not read.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.names import MAIN_OF_REPLICATED
from megatron_eopt.checkpoint.groups import children_of, saved_groups
from megatron_eopt.checkpoint.local_state import MAINS
from megatron_eopt.explain.saved import Entry, Saved, broken, inner_name
from megatron_eopt.optimizers.nested_state import leaves

FOLDERS = "mp_rank_*"
FORMAT = "torch"
_MODEL = "model_optim_rng.pt"
_BUCKETS = "distrib_optim.pt"
_FRAGMENTS = "layer_wise_optimizer_*.pt"


def read(folder: Path) -> Saved:
    """Return what the files of all ranks hold; copies of a tensor count as often as they lie there.

    Raises:
        ConfigurationError: If a file is missing or not to be understood.
    """
    saved = Saved(folder, FORMAT)
    places = sorted(path for path in folder.glob(FOLDERS) if path.is_dir())
    for number, place in enumerate(places):
        content = _load(place / _MODEL)
        for key, model in content.items():
            if str(key).startswith("model") and isinstance(model, Mapping):
                saved.entries += _tensors(model)
        states = content.get("optimizer") or {}
        saved.entries += _numbered(saved, states, first=number == 0)
        if number == 0:
            saved.common = {key: content[key] for key in ("args", "iteration") if key in content}
        for path in sorted(place.glob(_FRAGMENTS)):
            saved.writers += 1
            saved.entries += _fragments(_load(path))
        if (place / _BUCKETS).exists():
            saved.entries += _buckets(_load(place / _BUCKETS))
    saved.writers = max(saved.writers, len(places))
    inside = sum(entry.bytes for entry in saved.entries)
    size = sum(path.stat().st_size for path in folder.glob(f"{FOLDERS}/*.pt"))
    saved.objects = max(0, size - inside)
    saved.form = "a file a rank"
    return saved


def _load(path: Path) -> Any:
    folder, name = path.parent.parent, f"{path.parent.name}/{path.name}"
    if not path.exists():
        raise broken(folder, f"lacks the file {name}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever a broken or foreign file makes the reader raise
        rule = f"its file {name} cannot be read as data ({type(error).__name__}: {error})"
        raise broken(folder, rule) from error


def _tensors(model: Mapping[str, Any]) -> Iterator[Entry]:
    for name, value in model.items():
        if isinstance(value, Tensor) and not name.endswith("_extra_state"):
            yield _entry(name, None, value)


def _entry(name: str | None, kind: str | None, value: Tensor, of_matrix: bool = False) -> Entry:
    return Entry(name, kind, tuple(value.shape), value.dtype, of_matrix=of_matrix)


def _numbered(saved: Saved, states: Any, *, first: bool) -> Iterator[Entry]:
    """Yield the state of parameters that have numbers only, and note their groups."""
    for place, part in enumerate(children_of(states) if states else ()):
        inner = part.get("optimizer", part)
        groups = saved_groups(part)
        for group in groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            if first:
                saved.groups.append(settings)
                numbers = group.get("params", ())
                saved.group_of |= {_unnamed(place, number): settings for number in numbers}
        for number, values in inner.get("state", {}).items():
            if isinstance(values, Mapping):
                yield from _state(_unnamed(place, number), values)
        for group, mains in zip(groups, part.get(MAINS, ()), strict=False):
            for number, value in zip(group.get("params", ()), mains, strict=False):
                yield _entry(_unnamed(place, number), MAIN_OF_REPLICATED, value)


def _unnamed(place: int, number: int) -> str:
    return f"(not named).{place}.{number}"


def _state(name: str, values: Mapping[str, Any]) -> Iterator[Entry]:
    shapes = [tuple(value.shape) for value in values.values() if isinstance(value, Tensor)]
    largest = max(shapes, key=lambda shape: torch.Size(shape).numel(), default=())
    for kind, nested in values.items():
        for _, value in leaves(nested):
            if isinstance(value, Tensor):
                yield _entry(name, kind, value, tuple(value.shape) != largest)


def _fragments(content: Mapping[str, Any]) -> Iterator[Entry]:
    for part in content["optimizers"]:
        for name, held in part["fragments"].items():
            for kind, value in held["state"].items():
                if isinstance(value, Tensor):
                    yield _entry(inner_name(name), kind, value)
        for name, held in part["matrices"].items():
            for path, value in held["state"].items():
                if isinstance(value, Tensor):
                    owner = inner_name(name).partition("[")[0]
                    yield _entry(owner, path[0], value, of_matrix=True)


def _buckets(content: Any) -> Iterator[Entry]:
    for path, value in leaves(content):
        if isinstance(value, Tensor):
            yield _entry(None, path[-1], value)
