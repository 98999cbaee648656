"""Run one section in this process and write its result, also if SIGTERM stops it."""

import argparse
import importlib
import json
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from benchmarks.files import write_whole
from benchmarks.gpu_check.context import Context, Outcome
from benchmarks.gpu_check.plan import SECTIONS
from benchmarks.gpu_check.ranks import ranks_on
from megatron_eopt.cpu import Device


class StoppedError(BaseException):
    """The process was told to end; no section catches this."""


def outcome_of(name: str, context: Context) -> Outcome:
    """Run a section and return its result; an exception becomes a problem."""
    with context.outcome.noting(name):
        module = importlib.import_module(f"benchmarks.gpu_check.sections.{name}")
        outcome: Outcome = module.run(context)
        return outcome
    return context.outcome


def _stop(*_: object) -> NoReturn:
    raise StoppedError


def _left(found: Outcome) -> str | None:
    """Return a sentence on a section that continues with the next call, or None."""
    if not found.left:
        return None
    return f"no time for {len(found.left)} ({found.left[0]}, ...); so far {found.headline}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=[section.name for section in SECTIONS])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    folder = arguments.out / arguments.section
    folder.mkdir(parents=True, exist_ok=True)
    device: Device = arguments.device
    context = Context(
        device, arguments.ranks, folder, arguments.small, arguments.seconds, ranks_on(device)
    )
    began = time.perf_counter()
    signal.signal(signal.SIGTERM, _stop)
    try:
        found = outcome_of(arguments.section, context)
    except StoppedError:
        found = context.outcome
    document = {
        "status": found.status,
        "seconds": round(time.perf_counter() - began, 1),
        "headline": found.headline,
        "problems": found.problems,
        "skipped": found.skipped or _left(found),
        "figures": found.figures,
    }
    text = json.dumps(document, indent=1) + "\n"
    write_whole(arguments.out / f"{arguments.section}.json", text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
