"""Test and benchmark megatron-eopt on the GPUs of this machine; no network is needed.

Each section runs in its own process. Its output goes to OUT/SECTION.log and its results to
OUT/SECTION.json. OUT/results.json contains all results and describes the machine; it is written
after each section. Run the command again to continue: sections that passed with the same code on
the same machine do not run again. The exit status is 1 if a section failed and 2 if a section did
not run. Without a GPU, the sections run with small sizes on the CPU.
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
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import report
from benchmarks.gpu_check.plan import MINUTES, SECTIONS
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
        "--out", type=Path, default=Path("runs/gpu_check"), metavar="DIR", help="results"
    )
    text = "write all results to this file (default: OUT/results.json)"
    parser.add_argument("--results", type=Path, metavar="FILE", help=text)
    text = "install the wheels of this folder to OUT/site and prefer them to installed packages"
    parser.add_argument("--wheels", type=Path, metavar="DIR", help=text)
    text = f"time limit; sections without time are reported as not run (default: {MINUTES:g})"
    parser.add_argument("--minutes", type=float, default=MINUTES, metavar="N", help=text)
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="SECTION", help="run these"
    )
    parser.add_argument("--again", action="store_true", help="repeat sections that passed")
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs (default: all)")
    parser.add_argument("--small", action="store_true", help="use small sizes")
    text = "run the sections on a CPU, with small sizes, some by Triton's interpreter; no results"
    parser.add_argument("--rehearse", action="store_true", help=text)
    return parser


def environment_of(out: Path) -> dict[str, str]:
    """Return the environment variables of all started processes."""
    site = [str(out / "site")] if (out / "site").exists() else []
    inherited = os.environ.get("PYTHONPATH")
    path = [str(ROOT), *site, *([inherited] if inherited else [])]
    defaults = {
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONWARNINGS": "ignore",
        # compiling megatron-core's fused functions takes minutes and needs a compiler
        "TORCHDYNAMO_DISABLE": "1",
        # without network, the host name may not resolve
        "GLOO_SOCKET_IFNAME": "lo",
        "PET_LOCAL_ADDR": "127.0.0.1",
    }
    own = {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
    # otherwise each process may spend many seconds compiling what it imports
    own["PYTHONDONTWRITEBYTECODE"] = ""
    return defaults | dict(os.environ) | own


def describe_machine(environment: dict[str, str]) -> Document:
    """Return the output of :mod:`benchmarks.gpu_check.machine`, run in its own process."""
    command = [sys.executable, "-P", "-m", "benchmarks.gpu_check.machine"]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=180
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:])
    machine: Document = json.loads(done.stdout.splitlines()[-1])
    return machine


def prepared_run(arguments: argparse.Namespace, began: float) -> tuple[Run, Document] | str:
    """Return the run and the machine's description, or the reason why nothing can run."""
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if arguments.wheels is not None:
        install(arguments.wheels.resolve(), out / "site")
    environment = environment_of(out)
    machine = describe_machine(environment)
    if machine["missing"]:
        packages = " ".join(machine["missing"])
        return (
            f"missing packages: {packages}. docs/how_to/clusters.md shows how to add them as wheels"
        )
    gpus = 0 if os.environ.get("MEGATRON_EOPT_DEVICE") == "cpu" else len(machine["gpus"])
    wanted = arguments.gpus or gpus or RANKS_ON_CPU
    if gpus and wanted > gpus:
        return f"--gpus {wanted}: this machine has only {gpus}"
    device = "cuda" if gpus else "cpu"
    environment["MEGATRON_EOPT_DEVICE"] = device
    small = arguments.small or device == "cpu"
    kept = {key: machine[key] for key in ("gpus", "driver", "packages", "python", "sources")}
    basis = {**kept, "device": device, "ranks": wanted, "small": small}
    deadline = began + 60 * arguments.minutes
    return Run(out, deadline, device, wanted, small, basis, environment), machine


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    began = time.monotonic()
    parser = make_parser()
    arguments = parser.parse_args(argv)
    for name in ("minutes", "gpus"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name} {value}: must be a number above 0")
    if arguments.rehearse:
        rehearse: Any = import_module("benchmarks.gpu_check.rehearsal").rehearse
        outcomes = rehearse(arguments.only, arguments.out.resolve())
        return int(any(outcome.problems for outcome in outcomes.values()))
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
    results = arguments.results or run.out / "results.json"
    results.parent.mkdir(parents=True, exist_ok=True)
    for section in SECTIONS:
        if section.name in arguments.only:
            print(f"{section.name}: {section.meaning} ...", flush=True)
            sections[section.name] = found = run.document(section, again=arguments.again)
            print(f"  {found['status']} after {found['seconds']:.0f} s", flush=True)
        elif (kept := run.kept(section)) is not None:
            sections[section.name] = kept
        # write after each section, in case of an interruption
        report.write(results, machine, sections)
    report.show(machine, sections)
    print(f"All figures: {results}")
    statuses = {found["status"] for found in sections.values()}
    return 1 if "failed" in statuses else 2 if "not run" in statuses else 0


if __name__ == "__main__":
    # otherwise sections would continue to run, since they have their own sessions
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("gpu_check: interrupted. Run it again to continue.")
