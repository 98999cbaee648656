"""Through which files a gradient goes in a step, counted by running one."""

import sys
from pathlib import Path
from typing import Any

import megatron_eopt
from tests.harness import run_ranks
from tests.unit.storage.full_state import Case, build, steps
from tests.unit.storage.runs import inject

PACKAGE = Path(megatron_eopt.__file__).parent


def files_of_a_step(case: Case) -> list[str]:
    """Return our files with functions that run in a step, once everything has run once."""
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 1)
    inject(case.run, chunk, 1)
    found = set()

    def note(frame: Any, event: str, _arg: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found.add(path.relative_to(PACKAGE).as_posix())

    sys.setprofile(note)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return sorted(name for name in found if not name.startswith("cpu/"))


GRADIENTS_PASS = {
    "wrappers/chain.py",
    "storage/zero1.py",
    "optimizers/update_rule.py",
    "optimizers/muon_rule.py",
    "optimizers/engine.py",
    "layouts/redistribution.py",
    "math/orthogonalize.py",
    "math/newton_schulz.py",
}
"""From DDP's buffer to the new weight of a matrix."""


def test_a_gradient_goes_through_these_files():
    case = Case("muon", ddp={"use_distributed_optimizer": True})
    for files in run_ranks(2, files_of_a_step, case):
        assert set(files) >= GRADIENTS_PASS
