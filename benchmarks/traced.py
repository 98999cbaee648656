"""Count the functions that build, run and load an optimizer, of this package and Megatron-Core's.

    python -m benchmarks.traced [--list | --momentum]

One GPT layer in bfloat16, DP 2 x TP 2, Muon and Adam with sharded state, on rank 0. A load is that
of a ``torch_dist`` checkpoint at the same layout; without the checks of files, which any load does.
``--list`` prints the functions in the order of their first call, indented by depth. ``--momentum``
prints those of a build and a step that hold the value of ``muon_momentum``: in a variable, in a
dictionary or a list of one, or as their result.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer

import megatron_eopt
from benchmarks.about import table
from benchmarks.optimizer_step.arms import OURS, STOCK, Arm, wrapped_for
from megatron_eopt import EmergingOptimizerConfig, checkpoints
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import tiny_gpt

FOLDERS = {
    OURS: Path(megatron_eopt.__file__).parent,
    STOCK: Path(megatron_optimizer.__file__).parent,
}
ARMS = (
    Arm("ours", OURS, EmergingOptimizerConfig, "auto", "fragments"),
    Arm(
        "Megatron-Core's, layer-wise",
        STOCK,
        megatron_optimizer.OptimizerConfig,
        "duplicated",
        "padded",
    ),
)
STEPS = 2

MOMENTUM = 0.9317
"""A value that no other setting has."""

type Calls = dict[tuple[str, int, str], list[int]]
"""Depth of the first call and number of calls, by file, line and name of a function."""


def traced(folder: Path, work: Callable[[], Any]) -> tuple[Any, Calls]:
    """Return the result of ``work``, and its calls of functions below a folder."""
    found: Calls = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not is_inside(frame, folder):
            return
        depth, above = 0, frame.f_back
        while above is not None:
            depth, above = depth + is_inside(above, folder), above.f_back
        found.setdefault(key_of(frame, folder), [depth, 0])[1] += 1

    return profiled(work, note), found


def profiled(work: Callable[[], Any], note: Callable[[FrameType, str, Any], None]) -> Any:
    """Return the result of ``work``, of whose calls ``note`` is told."""
    sys.setprofile(note)
    try:
        return work()
    finally:
        sys.setprofile(None)


def is_inside(frame: FrameType, folder: Path) -> bool:
    """Tell whether a function is below a folder."""
    path = Path(frame.f_code.co_filename)
    # what stands in for CUDA, and what runs the ranks, is part of no optimizer
    outside = ("cpu", "testing")
    return path.is_relative_to(folder) and path.relative_to(folder).parts[0] not in outside


def key_of(frame: FrameType, folder: Path) -> tuple[str, int, str]:
    """Return the file, line and name of a function."""
    code = frame.f_code
    file = str(Path(code.co_filename).relative_to(folder))
    return file, code.co_firstlineno, code.co_qualname


def holders(folder: Path, work: Callable[[], Any], wanted: float) -> tuple[Any, list[str]]:
    """Return the result of ``work``, and the functions below a folder that hold a number."""
    found: dict[tuple[str, int, str], None] = {}

    def is_it(value: object) -> bool:
        return isinstance(value, float) and value == wanted

    def note(frame: FrameType, event: str, result: object) -> None:
        if event in ("call", "return") and is_inside(frame, folder):
            for value in (*frame.f_locals.values(), result):
                items = value.values() if isinstance(value, dict) else value
                many = isinstance(value, dict | list | tuple)
                if is_it(value) or (many and any(map(is_it, items))):
                    found[key_of(frame, folder)] = None

    result = profiled(work, note)
    return result, [f"{name}  {file}:{line}" for file, line, name in found]


def load(chunk: Any, optimizer: Any, folder: str) -> None:
    """Load the optimizer's state, as a program without the trainer does."""
    model = chunk.module.sharded_state_dict()
    state = {"optimizer": optimizer.sharded_state_dict(model, is_loading=True)}
    optimizer.load_state_dict(checkpoints.load(state, folder)["optimizer"])


def built(arm: Arm) -> tuple[Any, dict[str, Any]]:
    """Return a model for this arm's optimizer, and the fields of its configuration."""
    initialize_megatron(tp=2)
    sizes: dict[str, Any] = {"layers": 1, "gated": True, "position_embedding": "rope"}
    chunk = wrapped_for(arm.storage, tiny_gpt(dtype=torch.bfloat16, **sizes))
    return chunk, {"lr": 0.01, "bf16": True, "params_dtype": torch.bfloat16}


def set_gradients(chunk: Any) -> None:
    """Give all parameters gradients, and reduce them."""
    for param in chunk.parameters():
        param.main_grad.normal_()
    chunk.start_grad_sync()
    chunk.finish_grad_sync()


def of_momentum() -> list[str]:
    """Return the functions of a build and of a step that hold ``muon_momentum``."""
    arm, folder = ARMS[0], FOLDERS[OURS]
    chunk, fields = built(arm)
    fields["muon_momentum"] = MOMENTUM
    optimizer, first = holders(folder, lambda: arm.optimizer_of(chunk, **fields), MOMENTUM)
    set_gradients(chunk)
    _, more = holders(folder, optimizer.step, MOMENTUM)
    return list(dict.fromkeys([*first, *more]))


def build_and_step(number: int, folder_to_save: str) -> tuple[Calls, Calls, Calls]:
    """Return the calls of a build, of the last of some steps, and of a load in a new optimizer."""
    arm = ARMS[number]
    folder = FOLDERS[arm.factory]
    chunk, fields = built(arm)
    optimizer, build = traced(folder, lambda: arm.optimizer_of(chunk, **fields))
    step: Calls = {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        set_gradients(chunk)
        _, step = traced(folder, optimizer.step)
    if arm.factory != OURS:
        return build, step, {}
    state = {"optimizer": optimizer.sharded_state_dict(chunk.module.sharded_state_dict())}
    checkpoints.save(state, folder_to_save)
    optimizer = arm.optimizer_of(chunk, **fields)
    _, calls = traced(folder, lambda: load(chunk, optimizer, folder_to_save))
    return build, step, {key: its for key, its in calls.items() if "guard" not in key[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the functions of ours")
    parser.add_argument("--momentum", action="store_true", help="print who holds muon_momentum")
    given = parser.parse_args()
    if given.momentum:
        names = run_ranks(4, of_momentum, cpu=True, timeout=600)[0]
        print(*names, f"{len(names)} functions", sep="\n")
        return
    rows = []
    for number, arm in enumerate(ARMS):
        with tempfile.TemporaryDirectory() as folder:
            of_rank_0 = run_ranks(4, build_and_step, number, folder, cpu=True, timeout=600)[0]
        for what, calls in zip(("build", f"step {STEPS}", "load"), of_rank_0, strict=True):
            if not calls:
                continue
            files = {file for file, *_ in calls}
            depths, counts = zip(*calls.values(), strict=True)
            figures = (len(calls), len(files), sum(counts), max(depths) + 1)
            rows.append([what, arm.name, *map(str, figures)])
            for (file, line, name), (depth, count) in calls.items() if given.list else ():
                if arm.factory == OURS:
                    print(f"{'  ' * depth}{name}  {file}:{line}  x{count}")
    print(table("what | optimizer | functions: | files: | calls: | depth:", rows))


if __name__ == "__main__":
    main()
