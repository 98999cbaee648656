"""Makes docs/reference/benchmarks.md from the figures in docs/benchmarks/*.json.

    python -m benchmarks.page [--count]

With ``--count``, the models of the page's section "Counted" are counted again before, and written
to docs/benchmarks/counted.json.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from benchmarks import checkpoints, compiled, host_time, many_matrices, own_loop, wire
from benchmarks.about import table
from benchmarks.machine import commit
from benchmarks.optimizer_step import measure
from benchmarks.predicted import BESIDE, FIGURES, FLOPS, HEAD, ITEMS, MEMORY, milliseconds, rows

TARGET = FIGURES.parent / "reference" / "benchmarks.md"
OF_FLAGS = "--vocab-size 32768 --untie-embeddings-and-output-weights --seq-length 1024 --dp 1"
COUNTED = {
    "gpt": (
        "GPT, 8 layers, hidden size 2048, 1 rank",
        "--num-layers 8 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 "
        + OF_FLAGS,
    ),
    "8 query groups": (
        "the same with 8 query groups",
        "--num-layers 8 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 "
        "--group-query-attention --num-query-groups 8 " + OF_FLAGS,
    ),
    "small layers": (
        "GPT, 333 layers, hidden size 32 (1,998 matrices), 1 rank",
        "--num-layers 333 --hidden-size 32 --ffn-hidden-size 128 --num-attention-heads 4 "
        + OF_FLAGS,
    ),
    "llama": ("Llama-3-8B, TP 8 x DP 64, busiest rank", "--model llama-3-8b --tp 8 --dp 64"),
}
"""Titles of the models that a dry run counts, and the arguments of ``megatron-eopt plan``."""

KINDS = {
    "kernels": "kernels besides matrix products",
    "all_kernels": "all kernels",
    "muon_bytes": "bytes read and written per parameter of Muon",
    "adam_bytes": "bytes read and written per parameter of Adam",
    "tflop": "TFLOP of matrix products",
    "host_waits": "times that the host waits for the GPU",
}
SHOWN = {
    "gpt": ("kernels", "muon_bytes", "adam_bytes", "tflop", "host_waits"),
    "8 query groups": (),
}
"""Which of these the page compares with an older commit; of the other models only all kernels."""

PREDICTED = {"gpt": "16 groups", "8 query groups": "8 groups"}
"""Models whose step the page predicts for an H100, and their names in the table."""

OWN_TILES = (560e12, 500e12)
"""FLOP/s that our kernel of symmetric products should reach, by its tiles of 128 x 128; no GPU has
shown it."""

BESIDE_PRODUCTS = "all, if what runs beside products costs nothing"

LEAST = {"gpt": 10.72, "8 query groups": 8.42}
"""TFLOP if half of every symmetric product is computed."""

FLOOR = {
    "matrix products": 0.0,
    "gradient norm": 4,
    "Muon: directions": 14,
    "Muon: weights": 12,
    "Adam": 30,
}
"""Least bytes per parameter: gradient, momentum, 16-bit direction; weight, update, 16-bit weight;
gradient, weight, two moments, 16-bit weight."""

GOLDEN = """
`golden` failed because of [Megatron-Core](../../CHANGELOG.md#known-limits).
"""

MEASURED = """
What `gpu_check` measured on {gpu}, beside the same prediction without what runs beside products,
and a replayed rank beside its [plan](../how_to/planning.md):

{table}
"""

PAGE = """\
# Benchmarks

What an optimizer step costs, and how to measure it again. In short:

* On one H100, a Muon step takes {gpu_ours:.0f} ms, and Megatron-Core's Muon {gpu_stock:.0f} ms.
* With TP 2, a training step with Muon sends {wire_ours:.0f} MB, and with Megatron-Core's modes
  {wire_stock:.0f} MB or more.
* On a 3M-parameter model, Muon reaches Adam's final loss in {steps_of_muon:.0f} of 120 steps.

In the tables:

* **ours** is this package, **stock** Megatron-Core 0.19.2 with emerging-optimizers, **stock's
  iteration** the latter's Newton-Schulz.
* **fragments** shards optimizer state (`--use-distributed-optimizer`), **padded layer-wise** is
  Megatron-Core's `dist_muon`, and **plain** replicates state.
* **x ours** is a time divided by ours: median and quartiles of alternating runs.

[Raw figures](../benchmarks) are JSON files. [Newton-Schulz accuracy](accuracy.md) has its own page.

## On a GPU

`./scripts/gpu_check.sh` ([explained here](../how_to/clusters.md)) on {gpu}:

{gpu_sections}
{gpu_golden}
One step of a GPT with 0.5 billion parameters (8 layers, hidden size 2048, bfloat16), without
Transformer Engine and Apex:

{gpu_steps}

Its weights, gradients, optimizer state and buffers take {gpu_muon_gb:.1f} GB with Muon and
{gpu_adam_gb:.1f} GB with Adam.

Five Newton-Schulz iterations in 16 bits. TFLOP/s count the standard form's operations for both
forms. The deviation is relative to float32.

{gpu_iterations}

## Counted

`megatron-eopt plan` [counts](../how_to/planning.md) one step with clipping, without a GPU.

{counted}

"Before" is commit {before}, "now" is {now}. Only "now" counts that libraries copy the addend of a
product; with these copies, commit {predicted_before} moved 58 bytes per parameter of Muon. No GPU
has run either column's code: the GPU times above are of commit {gpu_commit}, which is older. Add
`--json` for all figures:

```bash
{counted_commands}
```

What these counts predict for one H100, at 660 TFLOP/s and 2.8 TB/s, in ms. An H100 has reached
both; our own kernel of symmetric products should reach 500 to 560 TFLOP/s. "Before" is commit
{predicted_before}, "floor" reads and writes each number once, with half of the symmetric products.

{predicted}
{measured}
Gaps between kernels are left out, and tiles on the diagonal of symmetric results: these are
computed whole, which takes about 0.5 ms. The groups are query groups. The last two rows are bounds:
Adam's pass and three quarters of the directions run on side streams.

## Compiled kernels

What our Triton kernels use on an A100 (sm_80), H100 (sm_90), B200 (sm_100) and MI300 (gfx942):
registers of a thread / bytes of shared memory of a program. None keeps registers in memory. Triton
{triton} compiled them without a GPU (`python -m benchmarks.compiled --write`).

{compiled}

## On a wire

`python -m benchmarks.wire --json docs/benchmarks/wire.json`, as root on Linux, connects two ranks
by a network link of a set rate and counts its bytes. One training step of a GPT (4 layers, hidden
size 512, bfloat16, FSDP2 in float32) on {wire}. "Planned" is what NCCL's rings would send. gloo
sends a reduce-scatter twice. "Difference" compares measured bytes with gloo's.

{wire_steps}

## One optimizer step, counted

`python -m benchmarks.optimizer_step --json FILE` counts one step on the rank with the most work.
Model and gradients are the same for all. "Difference" is the distance of the weights from ours
after three steps, relative to how far they moved. On {steps}.

{counted_steps}

## Muon and Adam on the quickstart's model

```bash
./scripts/compare_optimizers.sh --lr adam=3e-4,1e-3,3e-3 muon=1e-3,3e-3,1e-2 --seeds 1 2 3 \\
    --steps 120 --processes 1 --muon-fp32-matmul-prec highest
```

This trains the quickstart's byte-level GPT (3 million parameters, 2,048 bytes a step, weight decay
0.1, cosine schedule to a tenth of the learning rate), one run per core beside other work, on
{compare}.

![Held-out losses against steps and time](../benchmarks/compare_optimizers.png)

{compared}

* **Learning rates**: both grids began as 1e-3, 3e-3, 1e-2. Adam's moved down by one: its first
  seed was worse at 3e-3 than at 1e-3, and worse still at 1e-2 (stopped at step 98). Nothing else
  was tuned. Bold rates have the best median.
* **Seeds**: with equal seeds and batches, Muon ends 0.13 to 0.16 lower. Each evaluation uses 160
  other sequences, which causes most of the zigzags.
* **Time**: steps times seconds per step, the lowest median of nine runs. Other work made runs up to
  three times as long. Batches of 2,048 bytes make Muon's share of a step large.
* **Limits**: 120 steps are early in a training.

## Checkpoints

`python -m benchmarks.checkpoints --json FILE` saves and loads the GPT of the counted step (DP 2)
and its optimizer with `dist_checkpointing`, on {checkpoints}.

{saved}

`sharded_state_dict` alone takes these CPU seconds for a bfloat16 GPT of 1,200 matrices (300 layers,
hidden size 32) in one gloo process (medians of {rounds} alternating rounds, commit {state_dicts}).
"Stock's Adam" uses the distributed optimizer.

{state_dict_table}

With `dp_reshardable`, the trainer's default, stock's Adam is saved without a gather, but Muon by
parameter. The times include no copies from a GPU.

## Models with many matrices

`python -m benchmarks.many_matrices --json FILE` measures CPU seconds in your own training loop, on
one rank. Weights are small, because the time depends on the number of matrices and not on their
sizes. Qwen3 has its 48 layers of 128 experts, in 3-D weights. On {many}.

{many_matrices}

## An own loop

`python -m benchmarks.own_loop --json FILE --before PATH` measures what an optimizer costs beside
`import torch` and a model's first backward pass, after its build and first step: resident memory
and CPU seconds of a process, imports included (medians). "Before" is commit {own_loop_before}. On
{own_loop}.

{own_loop_table}

torch's own optimizers import its compiler, to turn it off for some of their methods.

## What the host of a step takes

`python -m benchmarks.host_time --json FILE` measures CPU milliseconds of a step on one rank, apart
from arithmetic: matrices have 32 rows or columns. In "ours, launches", kernels seem to run and do
nothing, as on a GPU that is far ahead. On {host}.

{host_time}
"""


def read(name: str) -> Any:
    """Return the figures of a file."""
    return json.loads((FIGURES / f"{name}.json").read_text())


def page() -> str:
    """Return the whole page."""
    gpu, counted, built = read("gpu_check"), read("counted"), read("compiled")
    over_wire, compared, saved = read("wire"), read("compare_optimizers"), read("checkpoints")
    steps, state_dicts = read("optimizer_step"), read("state_dicts")
    many, host, own = read("many_matrices"), read("host_time"), read("own_loop")
    sections = gpu["sections"]
    times, sent = sections["step"]["figures"]["milliseconds"], over_wire["steps"]
    memory = sections["memory"]["figures"]
    return PAGE.format(
        gpu_ours=times["muon"],
        gpu_stock=times["stock muon, plain"],
        wire_ours=sent["Muon, TP 2"]["1gbit"]["wire"] / 1e6,
        wire_stock=sent["Muon, TP 2, stock's duplicated"]["1gbit"]["wire"] / 1e6,
        steps_of_muon=compared["optimizers"]["muon"]["steps_to_common_loss"],
        gpu=of_gpu(gpu["machine"]),
        gpu_sections=of_sections(sections),
        gpu_golden=GOLDEN if "golden" in sections else "",
        gpu_steps=of_steps(sections["step"]["figures"]),
        gpu_muon_gb=memory["muon"][0]["standing"] / 1e9,
        gpu_adam_gb=memory["adam"][0]["standing"] / 1e9,
        gpu_commit=gpu["machine"]["commit"],
        gpu_iterations=of_iterations(sections["newton_schulz"]["figures"]["rows"]),
        counted=of_counts(counted),
        before=counted["before"]["commit"],
        now=counted["commit"],
        counted_commands="\n".join(map(shown_command, COUNTED)),
        predicted_before=counted["predicted_before"]["commit"],
        predicted=of_prediction(counted),
        measured=of_measurement(sections),
        triton=built["triton"],
        compiled=compiled.shown(built),
        wire=machine(over_wire),
        wire_steps=wire.shown(over_wire["steps"]),
        steps=machine(steps),
        counted_steps=measure.shown(steps["steps"]),
        compare=machine(compared),
        compared=of_comparison(compared),
        checkpoints=machine(saved),
        saved=checkpoints.shown(saved["arms"]),
        rounds=state_dicts["about"]["rounds"],
        state_dicts=state_dicts["about"]["commit"],
        state_dict_table=of_state_dicts(state_dicts["arms"]),
        many=machine(many),
        many_matrices=many_matrices.shown(many),
        own_loop=machine(own),
        own_loop_before=own["before"],
        own_loop_table=own_loop.shown(own["own_loop"]),
        host=machine(host),
        host_time=host_time.shown(host["milliseconds"]),
    )


def machine(figures: dict[str, Any]) -> str:
    """Return in words what figures were measured on."""
    about = figures["about"]
    packages = ("torch", "megatron-core", "emerging-optimizers")
    versions = ", ".join(f"{name} {about[name]}" for name in packages)
    load = f", load average {about['load']} before" if "load" in about else ""
    at = f", commit {about['commit'][:7]}" if about.get("commit") else ""
    return f"{about['cores']} CPU cores ({about['machine']}{load}; {versions}{at})"


def of_gpu(about: dict[str, Any]) -> str:
    """Return the same of a machine with GPUs."""
    gpus = about["gpus"]
    versions = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    driver = f"driver {about['driver']}; {versions}; commit {about['commit']}"
    return f"{len(gpus)} {gpus[0]['name']} ({driver})"


def spread(quartiles: list[float]) -> str:
    """Return a median and the quartiles around it."""
    low, median, high = quartiles
    return f"{median:.2f} ({low:.2f} .. {high:.2f})"


def of_sections(sections: dict[str, Any]) -> str:
    rows = [
        [name, found["status"], *(found["problems"] or [found["headline"]])]
        for name, found in sections.items()
        # these have tables of their own, and captured steps are gone
        if name not in ("step", "replay", "newton_schulz", "cuda_graph")
    ]
    return table("check | result | found", rows)


def of_steps(figures: dict[str, Any]) -> str:
    rows = [
        [name, f"{ms:.1f}", spread(figures["of ours"][name]) if name in figures["of ours"] else "1"]
        for name, ms in figures["milliseconds"].items()
    ]
    return table("optimizer | median, ms: | x ours:", rows)


def of_iterations(rows: list[dict[str, Any]]) -> str:
    timed = [row for row in rows if "milliseconds" in row]
    timed.sort(key=lambda row: (row["matrices"], row["milliseconds"]))
    cells = [
        [
            *(row["backend"], row["algorithm"], row["matrices"], f"{row['milliseconds']:.3g}"),
            *(f"{row['tflops']:.0f}", f"{row['deviation']:.1e}"),
        ]
        for row in timed
    ]
    return table("back end | form | matrices | ms: | TFLOP/s: | deviation:", cells)


def of_counts(figures: dict[str, Any]) -> str:
    rows = []
    for key, (title, _) in COUNTED.items():
        before, now = figures["before"].get(key, {}), figures["models"][key]
        for place, kind in enumerate(SHOWN.get(key, ("all_kernels",))):
            model = "" if place else title
            rows.append([model, KINDS[kind], f"{before[kind]:,}", f"{now[kind]:,}"])
    return table("model | | before: | now:", rows)


def of_prediction(figures: dict[str, Any]) -> str:
    """Return the table of predicted milliseconds."""
    columns: list[list[float]] = []
    for key in PREDICTED:
        now = figures["models"][key]
        for found in (figures["predicted_before"][key], now["phases"]):
            columns.append([milliseconds(found, phases) for phases in ITEMS.values()])
        columns.append([floor(item, now["elements"], now["least_tflop"]) for item in ITEMS])
    cells = [
        [item, *(f"{value:.1f}" for value in values)]
        for item, *values in zip((*ITEMS,), *columns, strict=True)
    ]
    cells.append(["**all**", *(f"**{sum(column):.1f}**" for column in columns)])
    beside = [
        sum(column)
        - sum(value * BESIDE.get(item, 0) for item, value in zip(ITEMS, column, strict=True))
        for column in columns
    ]
    for title, sums in (("all", [sum(column) for column in columns]), (BESIDE_PRODUCTS, beside)):
        if title == BESIDE_PRODUCTS:
            cells.append([title, *_of_now([f"{value:.1f}" for value in sums])])
        # the first item of a column is the products
        fast, slow = (
            [
                f"{all_ + column[0] * (FLOPS / rate - 1):.1f}"
                for all_, column in zip(sums, columns, strict=True)
            ]
            for rate in OWN_TILES
        )
        cells.append(
            [
                f"{title}, at 560 to 500 TFLOP/s",
                *_of_now(map(" to ".join, zip(fast, slow, strict=True))),
            ]
        )
    kinds = ("before", "now", "floor")
    heads = [f"{name}, {kind}:" for name in PREDICTED.values() for kind in kinds]
    return table(" | ".join(["item", *heads]), cells)


def _of_now(cells: Iterable[str]) -> list[str]:
    """Leave other columns than that of the present code empty."""
    return [cell if number % 3 == 1 else "" for number, cell in enumerate(cells)]


def of_measurement(sections: dict[str, Any]) -> str:
    """Return the table of predicted and measured milliseconds, if both are known."""
    found = rows(sections)
    gpu = of_gpu(read("gpu_check")["machine"])
    return MEASURED.format(gpu=gpu, table=table(HEAD, found)) if found else ""


def floor(item: str, elements: dict[str, int], tflop: float) -> float:
    """Return the least milliseconds of an item."""
    if item == "matrix products":
        return 1e15 * tflop / FLOPS
    owners = {"gradient norm": elements.values(), "Adam": [elements["AdamW"]]}
    count = sum(owners.get(item, [elements["TensorParallelMuon"]]))
    return 1e3 * count * FLOOR.get(item, 0) / MEMORY


def by_phase(counted: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return bytes and FLOPs by phase; normalization is what products do not account for."""
    found = {
        phase["name"]: {k: phase[k] for k in ("bytes", "flops")} for phase in counted["phases"]
    }
    passes = found["orthogonalization"]["bytes"]
    found["normalization"] = {"bytes": passes, "flops": 0}
    found["orthogonalization"]["bytes"] = 0
    return found


def of_comparison(figures: dict[str, Any]) -> str:
    rows = []
    for name, found in figures["optimizers"].items():
        for rate, median in found["median_of_grid"].items():
            row = [name, rate, f"{median:.4f}"]
            if float(rate) == found["lr"]:
                low, high = found["held_out_range"]
                row = [name, f"**{rate}**", f"{median:.4f}", f"{low:.4f} .. {high:.4f}"]
                row += [f"{found['seconds_per_step']:.2f}", f"{found['steps_to_common_loss']:.0f}"]
                row += [f"{found['seconds_to_common_loss']:.0f}"]
            rows.append(row + [""] * (7 - len(row)))
    loss = f"{figures['common_loss']:.4f}"
    head = "optimizer | learning rate: | median held-out loss: | range of seeds: "
    head += f"| seconds a step: | steps to {loss}: | seconds to {loss}:"
    return table(head, rows)


def of_state_dicts(arms: list[dict[str, Any]]) -> str:
    rows = []
    for arm in arms:
        row = [f"`{arm['form']}`", arm["optimizer"]]
        for kind in ("save", "load"):
            row += [f"{arm[kind]:.2f}", spread(arm[f"{kind}_ratio"])]
        rows.append(row)
    head = "sharding | optimizer | save, s: | x stock's Adam: | load, s: | x stock's Adam:"
    return table(head, rows)


def shown_command(key: str) -> str:
    """Return the command that counts a model."""
    words = COUNTED[key][1]
    for flag in (" --num-attention", " --vocab-size"):
        words = words.replace(flag, " \\\n   " + flag)
    return f"megatron-eopt plan {words}"


def count() -> None:
    """Count the models again."""
    figures = read("counted")
    for key, (_, arguments) in COUNTED.items():
        command = [sys.executable, "-m", "megatron_eopt", "plan", *shlex.split(arguments), "--json"]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        counted = json.loads(printed)["counted"]
        in_all, moved = counted["in_all"], counted["bytes_per_element"]
        figures["models"][key] = {
            "kernels": in_all["kernels"],
            "all_kernels": in_all["kernels_in_all"],
            "muon_bytes": round(moved["TensorParallelMuon"]),
            "adam_bytes": round(moved["AdamW"]),
            "tflop": round(in_all["flops"] / 1e12, 1),
            "host_waits": in_all["host_waits"],
        }
        if key in PREDICTED:
            least = {"least_tflop": LEAST[key], "elements": counted["elements"]}
            figures["models"][key] |= least | {"phases": by_phase(counted)}
    figures["commit"] = commit()[:7]
    (FIGURES / "counted.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    if "--count" in sys.argv:
        count()
    TARGET.write_text(page())
