"""Which tests a change needs: ``./scripts/test.sh`` asks for pytest's arguments.

python -m tests.rooms               # leaves out outside rooms in which nothing has changed
python -m tests.rooms optimizers    # the tests of rooms and of their neighbours
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]

OUTSIDE = {
    "tools": (
        "megatron_eopt/tools megatron_eopt/__main__.py",
        "unit/plan unit/explain unit/dry_run/test_kernels.py unit/dry_run/test_repeats.py"
        " unit/dry_run/test_report.py unit/test_command.py unit/test_rates.py"
        " functional/test_recipes.py functional/test_rates.py",
    ),
    "testing": (
        "megatron_eopt/testing megatron_eopt/extending.py examples/cautious_muon.py",
        "unit/test_conformance.py",
    ),
    "cpu": ("megatron_eopt/cpu", "unit/cpu"),
    "kernels": (
        "megatron_eopt/base/kernels.py megatron_eopt/base/peers.py megatron_eopt/base/gpu.py"
        " megatron_eopt/math megatron_eopt/layouts",
        "unit/base/test_kernels.py unit/layouts/test_block_copies.py",
    ),
    "numerics": (
        "megatron_eopt/math megatron_eopt/base megatron_eopt/config benchmarks"
        " megatron_eopt/layouts/exchange.py megatron_eopt/tools/dry_run",
        "unit/math",
    ),
    "gpu_check": (
        "benchmarks scripts/gpu_check.sh docs/how_to/clusters.md",
        "functional/test_gpu_check.py unit/scripts/test_gpu_check_runner.py"
        " unit/scripts/test_replay.py",
    ),
    "scripts": (
        "scripts megatron_eopt/launch.py benchmarks/compare_optimizers benchmarks/head_to_head"
        " docs/how_to README.md",
        "functional/test_commands.py functional/test_compare_optimizers.py"
        " functional/test_head_to_head.py functional/test_launch.py"
        " functional/test_launchers.py functional/test_quickstart.py"
        " functional/test_slurm.py unit/scripts/test_mutation.py"
        " unit/scripts/test_prepare_corpus.py"
        " unit/scripts/test_quickstart.py",
    ),
    "trainers": (
        "megatron_eopt/fsdp2 megatron_eopt/hugging_face.py megatron_eopt/state examples"
        " docs/how_to/other_trainers.md requirements.lock",
        "functional/test_other_trainers.py functional/test_from_adamw.py"
        " unit/contracts/test_frameworks.py",
    ),
    "wheel": ("pyproject.toml requirements.lock scripts", "functional/test_wheel.py"),
}
"""What is outside the core, by its name: its files, and the tests that nothing else needs."""

NEIGHBOURS = {
    "arguments": "unit/arguments unit/config unit/megatron_lm",
    "base": "unit/base unit/matrices unit/layouts unit/test_layers.py",
    "checkpoint": "unit/checkpoint unit/storage/test_own_counts.py",
    "config": "unit/config unit/arguments unit/matrices unit/wrappers/test_config_fields.py",
    "fsdp2": "unit/fsdp2",
    "guard": "unit/checkpoint functional/test_damaged_checkpoints.py",
    "layouts": "unit/layouts unit/matrices unit/storage/test_layouts.py",
    "math": "unit/math unit/optimizers/test_muon.py unit/optimizers/test_engine.py",
    "matrices": "unit/matrices unit/layouts unit/routing/test_splits.py unit/qk_clip",
    "megatron_core": "unit/megatron_core unit/wrappers unit/storage/test_layouts.py",
    "megatron_lm": "unit/megatron_lm unit/arguments functional/test_metadata_reads.py",
    "optimizers": "unit/optimizers unit/storage/test_layouts.py unit/fsdp2/test_layouts.py",
    "qk_clip": "unit/qk_clip unit/storage/test_clipping.py",
    "routing": "unit/routing unit/matrices unit/config/test_refusals.py",
    "state": "unit/checkpoint unit/storage/test_own_counts.py unit/fsdp2/test_checkpoint.py",
    "storage": "unit/storage/test_layouts.py unit/storage/test_empty_shares.py"
    " unit/storage/test_matrix_state.py unit/storage/test_convolutions.py unit/matrices"
    " unit/layouts unit/optimizers/test_engine.py unit/megatron_fsdp/test_layouts.py",
    "wrappers": "unit/wrappers unit/storage/test_layouts.py",
}
"""The tests of each room of the core, and those of its neighbours that notice most."""


def places_of(room: str) -> list[str]:
    """Return where the tests of a room and of its neighbours are."""
    named = NEIGHBOURS[room] if room in NEIGHBOURS else OUTSIDE[room][1]
    return [f"tests/{place}" for place in named.split()]


def is_in(file: str, places: Iterable[str]) -> bool:
    """Tell whether a file is one of these, or in a folder of them."""
    return any(f"{file}/".startswith(f"{place}/") for place in places)


def unchanged(changed: Iterable[str]) -> list[str]:
    """Return the outside rooms that have none of these files."""
    files = list(changed)
    return [
        room
        for room, (own, _) in OUTSIDE.items()
        if not any(is_in(file, [*own.split(), *places_of(room)]) for file in files)
    ]


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def changed_files() -> list[str]:
    """Return what differs from the last commit on main, whether committed or not.

    Raises:
        CalledProcessError: If this is no clone of a repository with a branch of that name.
    """
    branches = git("branch", "--all", "--list", "origin/main", "main", "--format=%(refname)")
    (base,) = git("merge-base", "HEAD", branches[-1] if branches else "main")
    return [*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")]


def main(rooms: list[str]) -> None:
    """Print arguments for pytest."""
    if unknown := [room for room in rooms if room not in {*NEIGHBOURS, *OUTSIDE}]:
        sys.exit(f"No such room: {', '.join(unknown)}. Rooms: {', '.join((*NEIGHBOURS, *OUTSIDE))}")
    if rooms:
        places = dict.fromkeys(place for room in rooms for place in places_of(room))
        sys.stdout.write(" ".join(places))
        return
    try:
        rooms = unchanged(changed_files())
    except (OSError, subprocess.CalledProcessError):
        return
    sys.stderr.write(f"Without rooms in which nothing has changed: {', '.join(rooms)}\n")
    sys.stdout.write(" ".join(f"--ignore={place}" for room in rooms for place in places_of(room)))


if __name__ == "__main__":
    main(sys.argv[1:])
