"""Makes docs/reference/flags.md from the parser, the configuration and megatron_fields.yaml.

``python -m scripts.reference_pages`` writes the page.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch
import yaml
from megatron.core.optimizer import OptimizerConfig

from megatron_eopt import EmergingOptimizerConfig, TorchOptimizerConfig
from megatron_eopt.arguments import add_arguments
from megatron_eopt.arguments.flags import groups
from megatron_eopt.config.fields import field_docs, field_types
from megatron_eopt.math.coefficients import CoefficientsLike, coefficient_names
from megatron_eopt.wrappers.config import all_default_values

MEANINGS = Path(__file__).resolve().parents[1] / "docs" / "reference" / "megatron_fields.yaml"
HEAD = """\
# Flags and settings

All optimizer settings. `--muon-tp-mode` on the command line is `muon_tp_mode` in
`EmergingOptimizerConfig`, and `muon-tp-mode` in a file for `--optimizer-config`, such as
[`examples/muon.yaml`](../../examples/muon.yaml). The first column adds the field's name if it
differs from the flag's, or if there is no flag.

The first default is ours, which `scripts/pretrain_gpt.py` and `EmergingOptimizerConfig` use. Where
Megatron's differs, it follows: "Megatron-Core" is its `OptimizerConfig`, "Megatron's flag" its
command line. `python -m megatron_eopt.launch` uses Megatron's, unless you pass
`--optimizer-defaults recommended`. [Run on GPUs and clusters](../how_to/clusters.md) lists the
environment variables.
"""
SECTIONS = {
    "optimizer layer": "General",
    "checkpoints": "Checkpoints",
    "muon": "Muon",
    "adaptive muon": "Adaptive Muon (AdaMuon, NorMuon, NAMO)",
    "soap": "SOAP",
    "lion": "Lion",
    "rest": "Megatron-Core's other fields",
}
"""Titles of the groups of flags, and of the fields that no group of ours has."""

PREFIXES = {"muon_": "muon", "adaptive_muon_": "adaptive muon", "soap_": "soap", "lion_": "lion"}
FIRST = ("optimizer", "optimizer_defaults", "optimizer_config")


class Settings:
    """What is known of all settings: fields, flags, defaults, meanings."""

    def __init__(self) -> None:
        from megatron.training.arguments import add_megatron_arguments

        self.types = field_types(EmergingOptimizerConfig)
        self.meanings: dict[str, str] = yaml.safe_load(MEANINGS.read_text())
        self.meanings |= field_docs(TorchOptimizerConfig)
        self.groups: dict[str, str] = {}
        for title, flags in groups().items():
            for flag, text in flags.items():
                self.groups[flag.replace("-", "_")] = title
                self.meanings.setdefault(flag.replace("-", "_"), text)
        stock = add_megatron_arguments(argparse.ArgumentParser())._actions
        self.stock = {action.dest: action for action in stock}
        parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser()))
        self.actions = {action.dest: action for action in parser._actions}
        self.ours, self.megatrons = (
            all_default_values("recommended"),
            all_default_values("megatron"),
        )
        self.of_megatron = {field.name for field in dataclasses.fields(OptimizerConfig)}

    def names(self) -> list[str]:
        """Return all settings, those that say which optimizer first."""
        return list(dict.fromkeys([*FIRST, *self.types, *self.groups]))

    def section(self, name: str) -> str:
        """Return the group of a setting."""
        if name in FIRST:
            return "optimizer layer"
        of_prefix = (group for prefix, group in PREFIXES.items() if name.startswith(prefix))
        return self.groups.get(name) or next(of_prefix, "rest")

    def row(self, name: str) -> str:
        """Return the row of a setting."""
        action = self.actions.get(name)
        options = action.option_strings if action else []
        if f"--{name.replace('_', '-')}" not in options:
            options = [name, *options]
        shown = "<br>".join(f"`{text}`" for text in options)
        cells = [shown, self.values(name), self.default(name), self.meanings[name]]
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    def values(self, name: str) -> str:
        """Return the choices of a setting, or its type."""
        action = self.actions.get(name)
        if action is not None and action.choices:
            names = [text for text in action.choices if not str(text).startswith("dist_")]
            return ", ".join(f"`{text}`" for text in names)
        if name not in self.types:
            return "file" if name.endswith("config") else "text"
        kind = self.types[name]
        if kind.choices:
            return ", ".join(f"`{text}`" for text in kind.choices)
        words = {bool: "on or off", int: "integer", float: "number", str: "text"}
        words |= {torch.dtype: "`torch.dtype`", tuple[str, ...]: "names"}
        words[CoefficientsLike] = ", ".join(f"`{n}`" for n in coefficient_names()) + ", or numbers"
        return words.get(kind.type, "object")

    def default(self, name: str) -> str:
        """Return the default, and Megatron-Core's where it is another one."""
        if name not in self.types:
            action = self.actions[name]
            return _shown(action.default)
        ours, found = self.ours[name], [_shown(self.ours[name])]
        if self.megatrons[name] != ours:
            found.append(f"Megatron-Core: {_shown(self.megatrons[name])}")
        stock = self.stock.get(name)
        if stock is not None and _differs(stock.default, self.megatrons[name]):
            found.append(f"Megatron's flag: {_shown(stock.default)}")
        return "; ".join(found)


def _shown(value: Any) -> str:
    if value is None or value == () or value == "":
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{str(value).removeprefix('torch.')}`"


def _differs(flag: Any, field: Any) -> bool:
    names = {"fp32": torch.float32}
    return flag is not None and names.get(flag, flag) != field and (flag or field) not in (0, "")


def page() -> str:
    """Return the whole page."""
    settings, parts = Settings(), [HEAD]
    for key, title in SECTIONS.items():
        names = [name for name in settings.names() if settings.section(name) == key]
        lines = [f"## {title}", "", "| Setting | Values | Default | Meaning |", "|---|---|---|---|"]
        parts.append("\n".join([*lines, *map(settings.row, names), ""]))
    return "\n".join(parts)
