#!/usr/bin/env python3
"""Compare another version of megatron-core or emerging-optimizers with the tested releases.

    python scripts/upstream_table.py PATH[:PATH ...]

Each PATH is a checkout: the folder that contains `megatron` or `emerging_optimizers`. The table
shows differences in the names that megatron-eopt uses (`megatron_core/upstream.py`), the fields of
the configuration, coefficient sets and optimizers. Exits with 1 if a name is missing.
"""

import argparse
import dataclasses
import inspect
import json
import logging
import os
import subprocess
import sys
from typing import Any

MISSING = "missing"


def described() -> dict[str, str]:
    """Return a description of each name in the packages that this process imports."""
    from megatron.core.optimizer import OptimizerConfig

    from megatron_eopt.base import upstream
    from megatron_eopt.config import registry
    from megatron_eopt.math import coefficient_names, coefficients
    from megatron_eopt.optimizers import built_in  # noqa: F401  registers optimizers

    logging.disable()
    found = {f"release of {name}": upstream.version_of(name) for name in upstream.TESTED}
    for name, module in upstream.MODULE_OF.items():
        there = upstream.find_upstream(name)
        found[f"{module}.{name}"] = MISSING if there is None else _signature(there)
    for field in dataclasses.fields(OptimizerConfig):
        found[f"OptimizerConfig.{field.name}"] = repr(field.default)
    for name in coefficient_names():
        triples = coefficients.table(name)
        found[f"coefficients {name}"] = f"{len(triples)} steps: {triples[0]}, ..."
    for name, entry in registry.entries().items():
        if entry.optimizer_cls.__module__.startswith("emerging_optimizers."):
            found[f"optimizer {name}"] = _signature(entry.optimizer_cls)
    return found


def _signature(item: Any) -> str:
    if not callable(item):
        return "present"
    return ", ".join(str(p).partition(":")[0] + _default(p) for p in _parameters(item))


def _parameters(item: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(item).parameters.values())
    except ValueError:
        return []


def _default(parameter: inspect.Parameter) -> str:
    named = "=" in str(parameter).partition(":")[0]
    return "" if named or parameter.default is parameter.empty else f"={parameter.default!r}"


def described_with(path: str) -> dict[str, str]:
    """Return :func:`described` of a new process whose PYTHONPATH begins with ``path``."""
    before = os.environ.get("PYTHONPATH", "")
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, (path, before)))}
    done = subprocess.run(
        [sys.executable, __file__, "--describe"],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(tested: dict[str, str], other: dict[str, str]) -> list[str]:
    """Return the lines of a Markdown table of the differences."""
    lines = ["| name | tested | checkout |", "|---|---|---|"]
    for key in dict.fromkeys((*tested, *other)):
        one, two = tested.get(key, "-"), other.get(key, "-")
        if one != two:
            lines.append(f"| {key} | {_apart(one, two)} | {_apart(two, one)} |")
    return lines


def _apart(mine: str, others: str) -> str:
    """Return the items of one list that the other lacks."""
    known = others.split(", ")
    return ", ".join(part for part in mine.split(", ") if part not in known) or "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", help="checkouts, separated by colons")
    parser.add_argument("--describe", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.describe:
        print(json.dumps(described()))
        return
    if args.path is None:
        parser.error("PATH is missing: pass the path of a checkout")
    tested, other = described_with(""), described_with(args.path)
    print("\n".join(table(tested, other)))
    lost = [key for key, value in other.items() if value.startswith(MISSING) and key in tested]
    sys.exit(bool([key for key in lost if not tested[key].startswith(MISSING)]))


if __name__ == "__main__":
    main()
