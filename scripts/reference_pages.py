"""Write the pages below docs/reference that are made from code and data.

It takes some seconds. The recipes' plans stay as they are, unless ``--plans`` makes them again,
which takes a minute. With ``--check`` nothing is written: what differs is printed, and the exit
code is 1 if a page is not what its source says.
"""

import argparse
import difflib
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_eopt import cpu

if __name__ == "__main__":
    cpu.enable_if_chosen()

from megatron_eopt.testing.pool import run_ranks
from scripts import error_table, flags_page, recipe_pages, routing_tables, support_page

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "flags.md": flags_page.page,
    "support.md": support_page.page,
    "errors.md": error_table.page,
    "routing.md": lambda: run_ranks(1, routing_tables.page)[0],
    "recipes.md": lambda: recipe_pages.page(recipe_pages.row_on_page),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.reference_pages", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--plans", action="store_true", help="also make the recipes' plans again")
    options, pages = parser.parse_args(), PAGES
    if options.plans:
        pages = pages | {"recipes.md": lambda: recipe_pages.page(recipe_pages.numbers)}
    changed = 0
    for name, page in pages.items():
        print(f"docs/reference/{name} ...", end=" ", flush=True)
        before, made = (FOLDER / name).read_text(), page()
        print("changed" if before != made else "as before")
        changed += before != made
        if not options.check:
            (FOLDER / name).write_text(made)
        elif before != made:
            lines = difflib.unified_diff(before.splitlines(), made.splitlines(), lineterm="")
            print(*lines, sep="\n")
    return int(options.check and changed > 0)


if __name__ == "__main__":
    sys.exit(main())
