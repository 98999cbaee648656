"""Recipes: Megatron's flags for published models, each with its source.

Each recipe is a YAML file in the folder ``recipes``; docs/reference/recipes.md shows them all.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from megatron_eopt.tools.plan.architectures import Architecture, flags_among, from_flags
from megatron_eopt.tools.plan.model import SIZES, ParallelLayout

_FOLDER = Path(__file__).with_name("recipes")

NAMES = sorted(path.stem for path in _FOLDER.glob("[a-z]*.yaml"))
"""Names of all recipes."""

_VARIANT = re.compile(r"-(base|instruct|chat|thinking)(-\d+)?$")
"""End of a model's name at Hugging Face that does not change its shape."""


@dataclass(frozen=True)
class Recipe:
    """How to train a published model."""

    title: str  # the model's name
    summary: str  # what kind of model it is
    optimizer: str  # the one that the authors published, and the one that the flags choose
    parameters: float  # number of parameters, as published
    sources: Mapping[str, str]  # URLs by name, the paper first
    published: Sequence[Mapping[str, Any]]  # groups of "flags", with their place in a source, "at"
    ours: Sequence[Mapping[str, Any]]  # groups of "flags" that are not published, with a reason
    layout: Mapping[str, Any]  # "flags" of one layout to plan with, and "why" it was chosen
    small: dict[str, Any]  # changes for a model that trains on a CPU in seconds; None drops a flag
    notes: Sequence[str]  # what the flags do not cover
    left_out: Sequence[str] = ()  # parts of the model that plans leave out, with their sizes
    base: str | None = None  # name of the recipe whose fields this one changes

    @property
    def flags(self) -> dict[str, Any]:
        """The flags of model, optimizer and schedule, without those of the layout."""
        flags: dict[str, Any] = {}
        for group in (*self.published, *self.ours):
            flags |= group["flags"]
        return flags

    @property
    def optimizer_settings(self) -> dict[str, Any]:
        """The matrix optimizer and its settings, by Megatron's names with underscores."""
        return {
            flag.replace("-", "_"): value
            for flag, value in self.flags.items()
            if flag.startswith(("optimizer", "muon-")) and flag != "optimizer-defaults"
        }

    def words(self, *, small: bool = False) -> list[str]:
        """Return the trainer's flags for the model, or for a ``small`` one of its kind.

        None of them has a meaning for a shell, so they need no quotes.
        """
        flags = self.flags
        flags |= _read("_small") | self.small if small else self.layout["flags"]
        flags["data-parallel-size"] = None  # follows from the number of processes
        given = (words_of(flag, value) for flag, value in flags.items() if value is not None)
        return [word for words in given for word in words]

    def architecture(self, **changes: Any) -> Architecture:
        """Return the model; ``changes`` replace flags, by Megatron's names with underscores."""
        return from_flags(flags_among(self.words()) | changes, self.title)

    def planned(self) -> ParallelLayout:
        """Return the layout that ``megatron-eopt plan`` uses by default."""
        sizes = self.layout["flags"]
        return ParallelLayout(
            **{f: sizes[flag] for f, (_, flag, _) in SIZES.items() if flag in sizes}
        )


def recipe(name: str) -> Recipe:
    """Read the recipe with a name of :data:`NAMES`."""
    content = _read(name)
    if "base" in content:
        base = _read(content["base"])
        lists = {key: base[key] + content.get(key, []) for key in ("published", "ours")}
        content = base | content | lists
    return Recipe(**content)


def words_of(flag: str, value: Any) -> list[str]:
    """Return the words of one flag on a command line; False turns a flag off."""
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]


def name_of(text: str) -> str:
    """Return the name of :data:`NAMES` that a user means; ``text`` in lower case if there is none.

    A model's name at Hugging Face, such as ``Qwen/Qwen3-30B-A3B``, also names its recipe.
    """
    wanted = _VARIANT.sub("", text.lower())
    for name in NAMES:
        pages = "".join(_read(name)["sources"].values()) if "/" in text else ""
        # as in https://huggingface.co/Qwen/Qwen3-30B-A3B-Base/blob/main/config.json
        shown = re.findall(r"huggingface\.co/([^/]+/[^/]+)", pages.lower())
        if wanted in [_VARIANT.sub("", model) for model in shown]:
            return name
    return text.lower()


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((_FOLDER / f"{name}.yaml").read_text())
    return content
