"""Recipes: Megatron's flags for published models, and where each of them was published.

Each is a YAML file in the folder ``recipes``; docs/reference/recipes.md shows them all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from megatron_eopt.plan.architectures import Architecture, flags_among, from_flags
from megatron_eopt.plan.model import SIZES, Layout

_FOLDER = Path(__file__).with_name("recipes")

NAMES = sorted(path.stem for path in _FOLDER.glob("[a-z]*.yaml"))
"""Of all recipes."""


@dataclass(frozen=True)
class Recipe:
    """How to train a published model."""

    title: str  # the model's name
    summary: str  # what kind of model it is
    optimizer: str  # which one its authors published, and which one the flags name
    parameters: float  # as its authors count them
    sources: Mapping[str, str]  # addresses by name, the paper first
    published: Sequence[Mapping[str, Any]]  # groups of "flags", and "at" which place they stand
    ours: Sequence[Mapping[str, Any]]  # groups of "flags" that were not published, and "why" these
    layout: Mapping[str, Any]  # "flags" of one layout to plan with, and "why" this one
    small: dict[str, Any]  # changes to a model that a CPU trains in seconds; None drops a flag
    notes: Sequence[str]  # what the flags leave out
    base: str | None = None  # the recipe that this one changes

    def words(self, *, small: bool = False) -> list[str]:
        """Return the command line that trains the model, or a small one of its kind on a CPU."""
        flags: dict[str, Any] = {}
        for group in (*self.published, *self.ours):
            flags |= group["flags"]
        flags |= _read("_small") | self.small if small else self.layout["flags"]
        flags["data-parallel-size"] = None  # follows from the number of processes
        given = {f"--{flag}": value for flag, value in flags.items() if value is not None}
        pairs = ([flag] if value is True else [flag, str(value)] for flag, value in given.items())
        return [word for pair in pairs for word in pair]

    def architecture(self, **changes: Any) -> Architecture:
        """Return the model's shape, with other values of flags by Megatron's names."""
        return from_flags(flags_among(self.words()) | changes, self.title)

    def planned(self) -> Layout:
        """Return the layout to plan with."""
        sizes = self.layout["flags"]
        return Layout(**{f: sizes[flag] for f, (_, flag, _) in SIZES.items() if flag in sizes})


def recipe(name: str) -> Recipe:
    """Return the recipe of one of :data:`NAMES`."""
    own = _read(name)
    if "base" in own:
        base = _read(own["base"])
        own = base | own | {key: base[key] + own.get(key, []) for key in ("published", "ours")}
    return Recipe(**own)


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((_FOLDER / f"{name}.yaml").read_text())
    return content
