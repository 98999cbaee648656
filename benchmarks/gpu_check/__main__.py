"""Checks and measures megatron-eopt on the GPUs of this machine; no network is needed.

Each section runs in a process of its own, whose output is in OUT/SECTION.log and whose results are
in OUT/SECTION.json; OUT/results.json has them all, with the machine. The same command goes on
where the last one ended: what passed with the same code on the same machine does not run again.
Ends with 1 if a section failed, with 2 if nothing could be run. Without a GPU it is a trial at
small sizes on the CPU.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_check import report
from benchmarks.gpu_check.plan import SECTIONS
from benchmarks.gpu_check.runner import Document, Run
from benchmarks.gpu_check.wheels import WheelsError, install
from benchmarks.machine import ROOT

RANKS_ON_CPU = 2


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(
        prog="./scripts/gpu_check.sh",
        description=__doc__,
        epilog="sections:\n" + "\n".join(f"  {s.name:15}{s.meaning}" for s in SECTIONS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu_check"), metavar="DIR", help="of results"
    )
    text = "folder of wheels that are used before what is installed (put into DIR/site)"
    parser.add_argument("--wheels", type=Path, metavar="DIR", help=text)
    text = "of all that runs; what is left is reported as not run (default: 9)"
    parser.add_argument("--minutes", type=float, default=9.0, metavar="N", help=text)
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="SECTION", help="run these"
    )
    parser.add_argument("--again", action="store_true", help="also what has passed before")
    parser.add_argument("--gpus", type=int, metavar="N", help="use so many (default: all)")
    parser.add_argument("--small", action="store_true", help="sizes of a trial")
    return parser


def environment_of(out: Path) -> dict[str, str]:
    """Return the variables of all processes that are started."""
    site = [str(out / "site")] if (out / "site").exists() else []
    inherited = os.environ.get("PYTHONPATH")
    path = [str(ROOT), *site, *([inherited] if inherited else [])]
    defaults = {
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONWARNINGS": "ignore",
        # compiling what is fused upstream takes minutes, and needs a compiler
        "TORCHDYNAMO_DISABLE": "1",
        # a machine without network may not know its own name
        "GLOO_SOCKET_IFNAME": "lo",
        "PET_LOCAL_ADDR": "127.0.0.1",
    }
    own = {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
    return defaults | dict(os.environ) | own


def describe_machine(environment: dict[str, str]) -> Document:
    """Return what :mod:`benchmarks.gpu_check.machine` says in a process of its own."""
    command = [sys.executable, "-P", "-m", "benchmarks.gpu_check.machine"]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=180
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:])
    machine: Document = json.loads(done.stdout.splitlines()[-1])
    return machine


def prepared_run(arguments: argparse.Namespace, began: float) -> tuple[Run, Document] | str:
    """Return what runs sections, and the machine; or why nothing can run."""
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if arguments.wheels is not None:
        install(arguments.wheels.resolve(), out / "site")
    environment = environment_of(out)
    machine = describe_machine(environment)
    if machine["missing"]:
        packages = " ".join(machine["missing"])
        return (
            f"missing packages: {packages}. Bring them as wheels: docs/how_to/clusters.md says how"
        )
    gpus = 0 if os.environ.get("MEGATRON_EOPT_DEVICE") == "cpu" else len(machine["gpus"])
    wanted = arguments.gpus or gpus or RANKS_ON_CPU
    if gpus and wanted > gpus:
        return f"--gpus {wanted}: {gpus} are here"
    device = "cuda" if gpus else "cpu"
    environment["MEGATRON_EOPT_DEVICE"] = device
    small = arguments.small or device == "cpu"
    kept = {key: machine[key] for key in ("gpus", "driver", "packages", "python", "sources")}
    basis = {**kept, "device": device, "ranks": wanted, "small": small}
    deadline = began + 60 * arguments.minutes
    return Run(out, deadline, device, wanted, small, basis, environment), machine


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    began = time.monotonic()
    parser = make_parser()
    arguments = parser.parse_args(argv)
    for name in ("minutes", "gpus"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name} {value}: must be a number above 0")
    try:
        prepared = prepared_run(arguments, began)
    except (WheelsError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        prepared = str(error)
    if isinstance(prepared, str):
        sys.stderr.write(f"gpu_check: {prepared}\n")
        return 2
    run, machine = prepared
    sys.path[:0] = run.environment["PYTHONPATH"].split(os.pathsep)
    sections: dict[str, Document] = {}
    for section in SECTIONS:
        if section.name in arguments.only:
            print(f"{section.name}: {section.meaning} ...", flush=True)
            sections[section.name] = found = run.document(section, again=arguments.again)
            print(f"  {found['status']} after {found['seconds']:.0f} s", flush=True)
        elif (kept := run.kept(section)) is not None:
            sections[section.name] = kept
        # after each, for who is interrupted
        report.write(run.out / "results.json", machine, sections)
    report.show(machine, sections)
    print(f"All figures: {run.out / 'results.json'}")
    statuses = {found["status"] for found in sections.values()}
    return 2 if statuses == {"not run"} else int("failed" in statuses)


if __name__ == "__main__":
    # sections have sessions of their own, and would run on
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("gpu_check: interrupted; the same command goes on")
