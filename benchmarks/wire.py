"""Measure what a training step sends: ``python -m benchmarks.wire``, as root on Linux.

Two network namespaces act as two hosts with one rank each. A virtual link connects them. Its
counters measure the bytes, and its rate is limited to that of a network.

The planned bytes are counted from the step's collectives. gloo implements reduce-scatter by an
all-reduce, which sends twice the bytes of NCCL; the counters are compared with that.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_model_config
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm

from benchmarks.about import about, publish, table
from benchmarks.optimizer_step.arms import OURS, SECTIONS, STOCK, VOCABULARY, Arm, Contestant
from benchmarks.rounds import milliseconds
from megatron_eopt import EmergingOptimizerConfig, cpu
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.tools.dry_run import Counts
from megatron_eopt.tools.plan.cost import bytes_sent
from tests.harness.megatron import initialize_megatron
from tests.harness.models import synthetic_batch, tiny_gpt, train_step

HOSTS = ("eopt-a", "eopt-b")
LINKS = ("eopt0", "eopt1")
ADDRESS = "10.77.0.{}"
RATES = ("1gbit", "10gbit")
WARM_UP, STEPS = 2, 3

TP, DP = SECTIONS[:2]
ADAM = {
    owner: Arm(f"{owner}, Adam", owner, EmergingOptimizerConfig, "auto", "fragments", "adam")
    for owner in (OURS, STOCK)
}
ARMS = {
    "Adam, DP 2": (DP, ADAM[OURS]),
    "Adam, DP 2, stock": (DP, replace(ADAM[STOCK], config=DP.arms[2].config)),
    "Muon, DP 2": (DP, DP.arms[0]),
    "Muon, DP 2, stock's padded layer-wise": (DP, DP.arms[2]),
    "Muon, TP 2": (TP, replace(TP.arms[0], tp_mode="exchange")),
    "Muon, TP 2, stock's duplicated": (TP, TP.arms[2]),
    "Muon, TP 2, stock's distributed": (TP, TP.arms[3]),
}
FSDP2 = "Muon, FSDP2 over 2"


def command(*words: str) -> None:
    subprocess.run(words, check=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[None]:
    """Create two network namespaces and a link between them; delete them afterwards."""
    made = []
    try:
        for host in HOSTS:
            command("ip", "netns", "add", host)
            made.append(host)
        ends = (LINKS[0], "netns", HOSTS[0], "type", "veth")
        command("ip", "link", "add", *ends, "peer", "name", LINKS[1], "netns", HOSTS[1])
        for number, (host, link) in enumerate(zip(HOSTS, LINKS, strict=True), start=1):
            inside = ("ip", "-n", host)
            command(*inside, "address", "add", f"{ADDRESS.format(number)}/24", "dev", link)
            command(*inside, "link", "set", "lo", "up")
            command(*inside, "link", "set", link, "up")
        yield
    finally:
        for host in made:
            command("ip", "netns", "delete", host)


def limit(rate: str) -> None:
    """Limit the rate at which both ends of the link send."""
    for host, link in zip(HOSTS, LINKS, strict=True):
        shape = ("root", "tbf", "rate", rate, "burst", "1mb", "latency", "50ms")
        command("ip", "netns", "exec", host, "tc", "qdisc", "replace", "dev", link, *shape)


def on_two_hosts(name: str) -> dict[str, float]:
    """Run a contestant with a rank on each host; return the figures of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        ranks = []
        for rank, (host, link) in enumerate(zip(HOSTS, LINKS, strict=True)):
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "MASTER_ADDR": ADDRESS.format(1),
                "MASTER_PORT": "29511",
                "GLOO_SOCKET_IFNAME": link,
                "OMP_NUM_THREADS": "1",
            }
            words = ["ip", "netns", "exec", host, sys.executable, "-m", "benchmarks.wire"]
            words += ["--rank-of", name, "--json", str(found)]
            ranks.append(subprocess.Popen(words, env=environment))
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise RuntimeError(f"{name}: the ranks ended with {codes}")
        result: dict[str, float] = json.loads(found.read_text())
        return result


def step_of(name: str) -> Callable[[int], object]:
    """Return a function that runs one training step of a contestant."""
    batches = [synthetic_batch(seed, vocabulary=VOCABULARY) for seed in range(WARM_UP + STEPS)]
    if name != FSDP2:
        section, arm = ARMS[name]
        initialize_megatron(tp=section.tp)
        one = Contestant(section, arm)
        # the trainer sets this function for the layer-wise optimizer
        get_model_config(one.model).finalize_model_grads_func = finalize_model_grads
        data = parallel_state.get_data_parallel_rank()
        return lambda step: train_step([one.model], one.optimizer, [batches[step - data]])
    initialize_megatron()
    model: Any = tiny_gpt(layers=4, hidden=512, heads=8, vocabulary=VOCABULARY)
    for part in (*model.decoder.layers, model):
        fully_shard(part)
    optimizer = build_optimizer(model, EmergingOptimizerConfig(optimizer="muon", lr=1e-2))

    def step(number: int) -> None:
        optimizer.zero_grad()
        batch = batches[number]
        model(batch.tokens, batch.positions, None, labels=batch.labels).mean().backward()
        optimizer.step()

    return step


def on_rank(name: str, path: Path) -> None:
    """Count and time a contestant's steps on this rank; rank 0 writes the figures."""
    cpu.enable()
    dist.init_process_group("gloo")
    step, rank = step_of(name), dist.get_rank()
    sent = Path(f"/sys/class/net/{LINKS[rank]}/statistics/tx_bytes")
    for number in range(WARM_UP):
        step(number)
    planned = by_gloo = wire = 0.0
    times = []
    for number in range(WARM_UP, WARM_UP + STEPS):
        dist.barrier()
        before = int(sent.read_text())
        with Counts() as counts:
            times.append(milliseconds(lambda number=number: step(number)))
        dist.barrier()
        wire += int(sent.read_text()) - before
        for call, often in counts.collectives.items():
            planned += bytes_sent(call) * often
            by_gloo += bytes_sent(call) * often * (2 if "reduce_scatter" in call.name else 1)
    own = {"planned": planned, "by gloo": by_gloo, "wire": wire}
    own = {name: value / STEPS for name, value in own.items()} | {"ms": min(times)}
    if rank == 0:
        path.write_text(json.dumps(own))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wire", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        on_rank(args.rank_of, args.json)
        return
    before = about()
    figures: dict[str, dict[str, dict[str, float]]] = {}
    with two_hosts():
        for rate in RATES:
            limit(rate)
            for name in tqdm((*ARMS, FSDP2), desc=rate, unit="contestant"):
                figures.setdefault(name, {})[rate] = on_two_hosts(name)
    publish({"steps": figures}, before, args.json)
    print(shown(figures))


def shown(figures: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the table of all figures, by contestant and rate."""
    rows = []
    for name, found in figures.items():
        slow, fast = (found[rate] for rate in RATES)
        cells = [name, *(f"{slow[kind] / 1e6:.2f}" for kind in ("planned", "by gloo", "wire"))]
        cells += [f"{slow['wire'] / slow['by gloo'] - 1:+.1%}"]
        rows.append([*cells, f"{slow['ms']:.0f}", f"{fast['ms']:.0f}"])
    head = "training step | planned, MB: | gloo sends, MB: | measured, MB: | difference: "
    return table(f"{head}| ms at 1 Gbit/s: | ms at 10 Gbit/s:", rows)


if __name__ == "__main__":
    main()
