"""Time and working memory of a step by size of waves, and by how much is off-loaded.

Run as ``python -m benchmarks.working_memory``: in the same two processes the contestants step in
turn, on the same gradients, in float32.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from benchmarks.about import about, publish
from benchmarks.rounds import measured, milliseconds, ratios, slowest
from megatron_eopt import EmergingOptimizerConfig, get_megatron_optimizer
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import tiny_gpt, wrap_ddp

LAYERS, HIDDEN, HEADS, RANKS, WARM_UP = 12, 256, 8, 2, 2
USUAL = (64.0, 0.0)
CONTESTANTS = [USUAL, (0.5, 0.0), (2.0, 0.0), (8.0, 0.0), (64.0, 0.5), (64.0, 1.0)]
"""MiB of a wave, and fraction that is off-loaded; the first is what others are compared with."""

_MIB = 2**20


class _Contestant:
    def __init__(self, wave_mb: float, fraction: float) -> None:
        model_parallel_cuda_manual_seed(1234)
        torch.manual_seed(1234)
        model = tiny_gpt(layers=LAYERS, hidden=HIDDEN, heads=HEADS, position_embedding="rope")
        self.model = wrap_ddp(model, use_distributed_optimizer=True)
        config = EmergingOptimizerConfig(
            optimizer="muon",
            lr=1e-2,
            use_distributed_optimizer=True,
            muon_fp32_matmul_prec="highest",
            muon_wave_mb=wave_mb,
            optimizer_cpu_offload=fraction > 0,
            optimizer_offload_fraction=fraction,
            # the second step, of those that are not timed
            log_optimizer_memory=True,
        )
        self.optimizer = get_megatron_optimizer(config, [self.model])

    def step(self, seed: int) -> float:
        """Return the milliseconds of a step."""
        generator = torch.Generator().manual_seed(seed)
        for param in self.model.parameters():
            param.main_grad.normal_(generator=generator)
        return milliseconds(self.optimizer.step)


def _on_rank(rounds: int) -> tuple[list[list[float]], list[Any]]:
    initialize_megatron()
    contestants = {str(contestant): _Contestant(*contestant) for contestant in CONTESTANTS}
    times = measured({name: one.step for name, one in contestants.items()}, rounds, WARM_UP)
    return list(times.values()), [one.optimizer.memory() for one in contestants.values()]


def measure(rounds: int, timeout: float) -> list[dict[str, Any]]:
    """Return a row for each contestant."""
    ranks = run_ranks(RANKS, _on_rank, rounds, timeout=timeout, cpu=True)
    times = [slowest(by_rank) for by_rank in zip(*(times for times, _ in ranks), strict=True)]
    rows = []
    for place, (wave_mb, fraction) in enumerate(CONTESTANTS):
        low, middle, high = ratios(times[place], times[0])
        memories = [memories[place] for _, memories in ranks]
        rows.append(
            {
                "wave_mb": wave_mb,
                "fraction": fraction,
                "ratio": middle,
                "quartiles": [low, high],
                "ms": statistics.median(times[place]),
                "resident_mib": max(m.main_weights + m.state for m in memories) / _MIB,
                "host_mib": max(m.host for m in memories) / _MIB,
                "buffers_mib": max(m.buffers for m in memories) / _MIB,
                "transient_mib": max(m.transient for m in memories) / _MIB,
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    lines = [
        "| waves | off-loaded | step (quartiles) | state | on host | buffers | working memory |",
        "|---:|---:|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        low, high = row["quartiles"]
        sizes = " | ".join(
            f"{row[f'{name}_mib']:.0f}" for name in ("resident", "host", "buffers", "transient")
        )
        lines.append(
            f"| {row['wave_mb']:g} | {row['fraction']:.0%} | "
            f"{row['ratio']:.2f} ({low:.2f} .. {high:.2f}) | {sizes} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.working_memory",
        description=(
            f"Time and working memory of a step of Muon (float32, {LAYERS} layers, hidden size "
            f"{HIDDEN}, {RANKS} processes with one thread each) by size of waves and by how much "
            "is off-loaded, over that of 64 MiB and nothing; sizes in MiB of a rank."
        ),
    )
    parser.add_argument("--rounds", type=int, default=15, help="steps of each, at least 4")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    if args.rounds < 4:
        parser.error("--rounds must be at least 4")
    before = about()
    rows = measure(args.rounds, args.timeout)
    print(table(rows))
    publish({"contestants": rows}, before, args.json)


if __name__ == "__main__":
    main()
