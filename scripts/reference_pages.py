"""Write the pages below docs/reference that are made from code and data.

    python -m scripts.reference_pages [--check]

flags.md comes from the parser and the configuration, support.md from support.yaml. The scripts for
errors.md, routing.md, recipes.md and benchmarks.md run in processes of their own. With ``--check``
nothing is written, and the exit code is 1 if a page is not what its source says.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_eopt import cpu

if __name__ == "__main__":
    cpu.enable_if_chosen()

from scripts import flags_page, support_page

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "flags.md": flags_page.page,
    "support.md": support_page.page,
}
SCRIPTS = (
    "scripts.error_table",
    "scripts.routing_tables",
    "scripts.recipe_pages",
    "benchmarks.page",
)


def main() -> int:
    options = sys.argv[1:]
    commands = [[sys.executable, "-m", name, *options] for name in SCRIPTS]
    running = [subprocess.Popen(command) for command in commands]
    changed = [name for name, page in PAGES.items() if (FOLDER / name).read_text() != page()]
    for name in changed:
        print(f"docs/reference/{name} is not what its source says", file=sys.stderr)
        if "--check" not in sys.argv:
            (FOLDER / name).write_text(PAGES[name]())
    failed = [process.wait() for process in running]
    return int(any(failed) or ("--check" in options and bool(changed)))


if __name__ == "__main__":
    sys.exit(main())
