"""Measure the CPU time of builds, loads and plans of models with many matrices.

Run it as ``python -m benchmarks.many_matrices --json docs/benchmarks/many_matrices.json``. Each
model has a process of its own, several times; the least time counts. Weights are small, because the
time depends on their number and not on their sizes.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from benchmarks.about import about, publish, table
from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.fsdp2 import build_optimizer

SIZES = (1250, 2500, 5000, 10000, 20000)
QWEN = "Qwen3-30B-A3B of transformers"
PLAN = "plan --model qwen3-30b-a3b --dp 64"


def model_of(name: str) -> nn.Module:
    """Return so many linear layers, or Qwen with short sides: 48 layers of 128 experts."""
    if name != QWEN:
        return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(int(name))))
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    layers = {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 2}
    sides = {"hidden_size": 16, "intermediate_size": 48, "moe_intermediate_size": 6}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=64, **layers, **heads, **sides))


def ours(model: nn.Module) -> Any:
    return build_optimizer(model, EmergingOptimizerConfig(optimizer="muon", lr=0.01))


def torchs(model: nn.Module) -> Any:
    return torch.optim.Muon(model.parameters(), lr=0.01)


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds of CPU time that this process spends."""
    began = time.process_time()
    work()
    return time.process_time() - began


def figures_of(model: nn.Module, make: Callable[[nn.Module], Any]) -> dict[str, float]:
    """Return how long it takes to build an optimizer, and to load its state."""
    make(model_of("8"))  # imports
    made: list[Any] = []
    build = seconds(lambda: made.append(make(model)))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    made[0].step()
    state = made[0].state_dict()
    return {"build": build, "load": seconds(lambda: made[0].load_state_dict(state))}


def measured(name: str) -> dict[str, float]:
    """Return the figures of one model."""
    model = model_of(name)
    found = figures_of(model, ours)
    schedules = [its for rule in ours(model).update_rules for its in rule.schedules]
    found["matrices"] = sum(len(schedule.names) for schedule in schedules)
    if name != QWEN:
        found |= {f"torch {kind}": value for kind, value in figures_of(model, torchs).items()}
    return found


def in_process(*words: str) -> tuple[str, float]:
    """Run this Python with arguments; return what it prints, and its seconds of CPU time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.many_matrices", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=3, help="number of processes for each model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.of:
        print(json.dumps(measured(args.of)))
        return
    before, models = about(), {}
    for name in tqdm((*map(str, SIZES), QWEN), unit="model"):
        runs = [
            json.loads(in_process("benchmarks.many_matrices", "--of", name)[0])
            for _ in range(args.rounds)
        ]
        models[name] = {kind: min(run[kind] for run in runs) for kind in runs[0]}
    plans = [in_process("megatron_eopt", *PLAN.split())[1] for _ in range(args.rounds)]
    figures = {"models": models, "plan": min(plans)}
    publish(figures, before, args.json)
    print(shown(figures))


def shown(figures: dict[str, Any]) -> str:
    """Return the table of all figures."""
    rows = []
    for name, found in figures["models"].items():
        model = f"{int(name):,} linear layers" if name.isdigit() else name
        row = [model, f"{found['matrices']:,}"]
        for kind in ("build", "load"):
            both = (found.get(of + kind) for of in ("", "torch "))
            row += ["" if value is None else f"{value:.2f}" for value in both]
        rows.append(row)
    rows.append([f"`megatron-eopt {PLAN}`", "", f"{figures['plan']:.1f}", "", "", ""])
    head = "model | matrices: | build, s: | torch's Muon, s: | load, s: | torch's Muon, s:"
    return table(head, rows)


if __name__ == "__main__":
    main()
