"""Measure what an optimizer of your own loop costs beside torch, after its build and first step.

Run it as ``python -m benchmarks.own_loop --json docs/benchmarks/own_loop.json``; ``--before PATH``
adds a checkout of an earlier version. Each optimizer has processes of its own, and the medians
count. Memory is what stays resident, over ``import torch`` and the model's first backward pass.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.about import about, publish, table

ROOT = Path(__file__).parents[1]

_MIB = 2**20


def resident() -> float:
    """Return this process's resident memory in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / _MIB


def ours(model: nn.Module) -> Any:
    from megatron_eopt import TorchOptimizerConfig, build_optimizer

    return build_optimizer(model, TorchOptimizerConfig(optimizer="muon", lr=0.01))


def before(model: nn.Module) -> Any:
    from megatron_eopt import EmergingOptimizerConfig
    from megatron_eopt.fsdp2 import build_optimizer

    return build_optimizer(model, EmergingOptimizerConfig(optimizer="muon", lr=0.01))


def torchs_modules(_: nn.Module) -> None:
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401


def torchs_muon(model: nn.Module) -> Any:
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.01)


def torchs_adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "ours, Muon": ours,
    "ours, before": before,
    "torch, Muon": torchs_muon,
    "torch, AdamW": torchs_adamw,
    "torch's DTensor and FSDP alone": torchs_modules,
}


def measured(name: str) -> dict[str, float]:
    """Return MiB and CPU seconds that one optimizer adds to this process."""
    model = nn.Sequential(
        nn.Embedding(8, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64)
    )
    tokens = torch.zeros(4, dtype=torch.long)
    model(tokens).sum().backward()
    memory, began = resident(), time.process_time()
    optimizer = MAKERS[name](model)
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return {"MiB": resident() - memory, "CPU seconds": time.process_time() - began}


def in_process(name: str, source: Path) -> dict[str, float]:
    """Return the figures of a process that has imported nothing but torch."""
    env = os.environ | {
        "PYTHONPATH": str(source),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    # this file, whichever version the package is of
    command = [sys.executable, __file__, "--of", name]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True, cwd=source)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.own_loop", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of processes for each")
    parser.add_argument("--before", type=Path, metavar="PATH", help="checkout of another version")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.of:
        print(json.dumps(measured(args.of)))
        return
    machine, found = about(), {}
    for name in MAKERS:
        source = args.before if name == "ours, before" else ROOT
        if source is not None:
            runs = [in_process(name, source.resolve()) for _ in range(args.rounds)]
            found[name] = {kind: statistics.median(run[kind] for run in runs) for kind in runs[0]}
    commit = ["git", "-C", str(args.before or ROOT), "rev-parse", "--short", "HEAD"]
    told = subprocess.run(commit, check=True, capture_output=True, text=True).stdout.strip()
    publish({"own_loop": found, "before": told}, machine, args.json)
    print(shown(found))


def shown(found: dict[str, Any]) -> str:
    """Return the table of all figures."""
    rows = [(name, f"{its['MiB']:.0f}", f"{its['CPU seconds']:.1f}") for name, its in found.items()]
    return table("optimizer | MiB over torch: | CPU seconds:", rows)


if __name__ == "__main__":
    main()
