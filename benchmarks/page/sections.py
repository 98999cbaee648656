"""What each file of figures becomes on the page: a heading, how it is measured, a table."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.page.comparison import comparison
from benchmarks.page.gpu import gpu_check
from benchmarks.page.markdown import machine, prose, quartiles, table

type Figures = dict[str, Any]

_BOTH = "against, shape | float32: ours, ratio (aim) | bfloat16"


def _steps_table(figures: Figures) -> str:
    rows = []
    for section in figures["steps"]:
        ratios = {ratio["name"]: ratio for ratio in section["ratios"]}
        for name, times in section["times"].items():
            ratio = ratios.get(name)
            shown = quartiles([ratio["low"], ratio["median"], ratio["high"]]) if ratio else "1"
            far = f"{ratio['step_difference']:.0e}" if ratio else ""
            rows.append([section["section"], name, f"{statistics.median(times):.0f}", shown, far])
    return table("layout | optimizer | median ms: | x ours (quartiles): | apart:", rows)


def _train_steps(figures: Figures) -> str:
    if not figures["train_steps"]:
        return ""
    rows = []
    for case in figures["train_steps"]:
        ours, adam = case["arms"]
        whole = [
            [a + b for a, b in zip(one["gradients"], one["step"], strict=True)]
            for one in (ours, adam)
        ]
        pairs = [a / b for a, b in zip(*whole, strict=True)]
        middle = (
            f"{statistics.median(one[part]):.0f}"
            for part in ("gradients", "step")
            for one in (ours, adam)
        )
        form = f"{case['microbatches']} x {case['sequences']} x {case['length']}"
        rows.append(
            [form, f"{case['vocabulary']:,}", *middle, quartiles(statistics.quantiles(pairs, n=4))]
        )
    head = """microbatches x sequences x tokens | vocabulary: | passes with Muon: | with Adam: |
    Muon's step: | Adam's: | whole, x Adam's (quartiles):"""
    text = """A whole train step, DP 2, 2,048 tokens a rank, in ms: forward and backward pass with
    the reduction of gradients, then the step of Muon or of stock's Adam. Short sequences have
    hardly any attention, and a small vocabulary hardly any logits; 50,304 is GPT-2's, padded."""
    return f"\n{prose(text)}\n{table(' '.join(head.split()), rows)}"


def steps(figures: Figures) -> str:
    """Write one optimizer step, products in bfloat16."""
    text = f"""## One optimizer step

    `python -m benchmarks.optimizer_step --json FILE --png FILE`: a bfloat16 GPT with 4 layers and
    hidden size 512, the same injected gradients, processes with one thread each.
    *Apart* is how far weights are from ours in the end, of the way they went: bfloat16 products
    round. {machine(figures)}

    ![Optimizer step](benchmarks/optimizer_step.png)"""
    return f"{prose(text)}\n{_steps_table(figures)}{_train_steps(figures)}"


def steps_fp32(figures: Figures) -> str:
    """Write the same with float32 products."""
    text = f"""### With float32 products

    The same with `--products fp32`, where the CPU has no instructions for
    bfloat16 and stock takes [dozens of times as
    long](#in-bfloat16-without-instructions-for-it). {machine(figures)}"""
    return f"{prose(text)}\n{_steps_table(figures)}{_train_steps(figures)}"


def steps_vectors(figures: Figures) -> str:
    """Write the same where a CPU has no tiles."""
    text = f"""### With vector instructions alone

    `python -m benchmarks.optimizer_step` on a CPU that multiplies bfloat16 [without
    tiles](numerics.md#symmetric-products), at twice float32's rate. Nine tenths of a step are
    products there, which weigh most beside the passes of short sequences. {machine(figures)}"""
    return f"{prose(text)}\n{_steps_table(figures)}{_train_steps(figures)}"


def profiles(figures: Figures) -> str:
    """Write where the time of steps and iterations goes."""
    kinds, rows = "", []
    for one in (*figures["steps"], *figures["iterations"]):
        for name, arm in one["arms"].items():
            times, work = arm["milliseconds"], arm["gigaflops"]
            kinds = " | ".join(f"{kind}:" for kind in times)
            cells = [f"{time:.1f}" for time in (*times.values(), sum(times.values()), work)]
            rows.append([one["name"], name, *cells, f"{work / times['products']:.2f}"])
    text = f"""### Where the time goes

    `python -m benchmarks.profile --json FILE`: milliseconds of a rank, by torch's profiler, which
    slows down what has many small operations. *Copies* are casts, too; *arithmetic* goes entry by
    entry, norms included; *waiting* is for other ranks; the *rest* is Python, views, allocations
    and the profiler. The last lines are Newton-Schulz alone; products are in {figures["products"]}.
    {machine(figures)}"""
    head = f"layout | optimizer | {kinds} | all: | GFLOP: | TFLOP/s:"
    return f"{prose(text)}\n{table(head, rows)}"


def newton_schulz(figures: Figures) -> str:
    """Write our iteration against others'."""
    before = f"""## Newton-Schulz

    `python -m benchmarks.newton_schulz --json FILE --png FILE`: our `algorithm="auto"` against
    emerging-optimizers' `newton_schulz` (EO; above 1 ours is faster), and one batched call against
    a loop. gram: with these [restarts](numerics.md#gram-newton-schulz). {machine(figures)}

    ![Newton-Schulz](benchmarks/newton_schulz.png)"""
    after = """**no** misses its aim: in 16 bits the Gram form needs two restarts to be
    [accurate](numerics.md#the-rule), so at n/m = 4 it has only 1.29 times fewer FLOPs. Its smaller
    products run a little slower than large ones, and what is [no product](#where-the-time-goes)
    (casts, norm, identity parts) either side has to do."""
    return f"{prose(before)}\n{table(_BOTH, _iterations(figures))}\n{prose(after)}"


def newton_schulz_fp32(figures: Figures) -> str:
    """Write the same for float32 alone."""
    before = f"""### In float32 alone

    The same with `--products fp32`. {machine(figures)}"""
    rows = [row[:2] for row in _iterations(figures)]
    return f"{prose(before)}\n{table('against, shape | ours, ratio (aim)', rows)}"


def newton_schulz_vectors(figures: Figures) -> str:
    """Write the same where a CPU has no tiles."""
    before = f"""### In bfloat16 by vector instructions

    `python -m benchmarks.newton_schulz` on a CPU without tiles, where panels of symmetric products
    pay in bfloat16, too. {machine(figures)}"""
    return f"{prose(before)}\n{table(_BOTH, _iterations(figures))}"


def newton_schulz_bf16(figures: Figures) -> str:
    """Write the same for bfloat16 where the CPU has no instructions for it."""
    before = f"""### In bfloat16 without instructions for it

    With `--products bf16`, on a CPU that multiplies in float32 alone. Ours
    [widens](numerics.md#widened-products) what it multiplies, torch's products go entry by entry;
    all of stock's `medium` takes so much longer there. {machine(figures)}"""
    rows = [[row[0], row[2]] for row in _iterations(figures)]
    return f"{prose(before)}\n{table('against, shape | ours, ratio (aim)', rows)}"


def _iterations(figures: Figures) -> list[list[str]]:
    shown: dict[tuple[str, str], dict[str, str]] = {}
    for one in figures["results"]:
        peer = {"vs EO": "EO", "vs loop": "loop"}.get(one["name"], one["name"])
        shape = "x".join(map(str, one["shape"]))
        sample, aim = one["sample"], f"({one['target']:.2f})"
        cell = f"{one['algorithm']}: not measured {aim}"
        if sample:
            missed = "" if sample["ratio"] >= one["target"] else " **no**"
            cell = f"{one['algorithm']}: {sample['ratio']:.2f} {aim}{missed}"
        shown.setdefault((peer, shape), {})[one["precision"]] = cell
    return [
        [f"{peer} {shape}", cells.get("highest", ""), cells.get("medium", "")]
        for (peer, shape), cells in shown.items()
    ]


def momentum(figures: Figures) -> str:
    """Write held-out losses by the momentum's dtype."""
    held = figures["held_out"]
    last = {
        dtype: {seed: curve[max(curve, key=int)] for seed, curve in runs.items()}
        for dtype, runs in held.items()
    }
    rows = []
    for dtype, by_seed in last.items():
        worst = "" if dtype == "fp32" else f"{worst_of(last, dtype):+.2%}"
        rows.append([dtype, *(f"{loss:.4f}" for loss in by_seed.values()), worst])
    seeds = " | ".join(f"seed {seed}:" for seed in last["fp32"])
    before = f"""## Momentum in fewer bits

    `python -m benchmarks.momentum --out FOLDER --json FILE --png FILE` trains the quickstart
    ({figures["steps"]} steps, seeds {", ".join(last["fp32"])}) with momentum in {", ".join(last)},
    prints held-out losses and draws them. It fails where one is over 1 % from float32's with the
    same seed, and goes on where it was stopped. Flags: `{" ".join(figures["flags"])}`.
    {machine(figures)}"""
    after = """![Held-out losses, and their deviation from float32's](benchmarks/momentum.png)

    With 8 bits rounded at random the same runs ended at 1.4913, 1.4862, 1.4271 (fp8) and 1.4771,
    1.4738, 1.4318 (int8), up to 2.11 % above float32's."""
    return f"{prose(before)}\n{table(f'momentum | {seeds} | at most:', rows)}\n{prose(after)}"


def worst_of[SeedT](last: Mapping[str, Mapping[SeedT, float]], dtype: str) -> float:
    """Return the largest relative deviation of a seed's loss from float32's."""
    return max((loss / last["fp32"][seed] - 1 for seed, loss in last[dtype].items()), key=abs)


def fsdp2(figures: Figures) -> str:
    """Write Muon on DTensor shards."""
    ours = {one["ranks"]: one["bytes_sent"] for one in figures["even"] if one["arm"] == "ours"}
    rows = []
    for one in figures["even"]:
        ratio = "1" if one["arm"] == "ours" else quartiles(one["ratios"])
        calls = str(sum(one["calls"].values()))
        # without rounds calls and bytes are all
        took = f"{statistics.median(one['times']):.0f}" if one["times"] else ""
        cells = [str(one["ranks"]), one["arm"], took, ratio]
        sent = f"{one['bytes_sent'] / ours[one['ranks']]:.2f}"
        rows.append([*cells, calls, sent, f"{one['difference']:.1e}"])
    uneven = "; ".join(f"{arm}: {outcome}" for arm, outcome in figures["uneven"].items())
    names = ("ranks:", "optimizer", "median ms:", "x ours (quartiles):", "calls:", "bytes, x ours:")
    before = f"""## Muon on DTensor shards

    `python -m benchmarks.fsdp2 --json FILE`: one step of ours, of `torch.optim.Muon` and of PyPI's
    muon_fsdp2 (where it can be imported) in the same processes, for the matrices of four GPT layers
    with hidden size 256, cut evenly by rows, with the same settings. Calls are one rank's in a
    step, bytes what all send. The error is the largest distance of a weight from float32 Muon in
    one process after three steps, as a part of the way it went. {machine(figures)}"""
    after = f"""With rows that do not divide (257 x 64, 3 x 64, 131 x 67 on two ranks): {uneven}.

    Ours aims at 2 times the speed of both and half of muon_fsdp2's bytes. Against muon_fsdp2 the
    first is met barely: 8 steps gave 2.33 and 2.03, and a busier machine, with our Nesterov
    momentum off, 1.39 and 1.30. The factor of 2 is one of idle cores."""
    return f"{prose(before)}\n{table(' | '.join((*names, 'error:')), rows)}\n{prose(after)}"


def megatron_fsdp(figures: Figures) -> str:
    """Write Muon under Megatron-FSDP."""
    rows = []
    for ranks in sorted(figures["ranks"], key=int):
        ours, theirs = figures["ranks"][ranks]["times"].values()
        pairs = [b / a for a, b in zip(ours, theirs, strict=True)]
        shown = [f"{statistics.median(times):.0f}" for times in (ours, theirs)]
        rows.append([ranks, *shown, quartiles(statistics.quantiles(pairs, n=4))])
    before = f"""## Muon under Megatron-FSDP

    `python -m benchmarks.megatron_fsdp --json FILE`: the matrices of four GPT layers with hidden
    size 256, float32; the other gathers every matrix on every rank. {machine(figures)}"""
    head = "ranks: | ours, ms: | gathered everywhere, ms: | x ours (quartiles):"
    return f"{prose(before)}\n{table(head, rows)}"


def checkpoints(figures: Figures) -> str:
    """Write saving and loading against stock's."""
    rows = []
    for number, one in enumerate(figures["arms"]):
        cells = [one["name"], f"{one['bytes'] / 1e6:.0f}"]
        for what in ("save", "load"):
            ratio = quartiles(one[f"{what}_ratio"]) if number else "1"
            cells += [f"{statistics.median(one[what]):.2f}", ratio]
        rows.append(cells)
    before = f"""## Checkpoints

    `python -m benchmarks.checkpoints --json FILE`: model and optimizer of the dense GPT above
    (DP 2), by megatron-core's `dist_checkpointing`. {machine(figures)}"""
    head = "optimizer | MB: | save s: | x ours (quartiles): | load s: | x ours (quartiles):"
    return f"{prose(before)}\n{table(head, rows)}"


def start_up(figures: Figures) -> str:
    """Write how long it takes to import and to build."""
    builds = " and ".join(
        f"{statistics.median(took):.1f} s ({name}, {min(took):.1f} to {max(took):.1f})"
        for name, took in figures["builds"].items()
    )
    imported = statistics.median(figures["imports"])
    return prose(
        f"""## Start

        `python -m benchmarks.start_up --json FILE`: importing the front door takes {imported:.2f} s
        beyond torch and megatron-core. Building Muon for {figures["matrices"]:,} matrices takes a
        rank of two {builds}. {machine(figures)}"""
    )


SECTIONS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("optimizer_step.json", steps),
    ("optimizer_step_vectors.json", steps_vectors),
    ("optimizer_step_fp32.json", steps_fp32),
    ("profile.json", profiles),
    ("newton_schulz.json", newton_schulz),
    ("newton_schulz_fp32.json", newton_schulz_fp32),
    ("newton_schulz_vectors.json", newton_schulz_vectors),
    ("newton_schulz_bf16.json", newton_schulz_bf16),
    ("gpu_check.json", gpu_check),
    ("compare_optimizers.json", comparison),
    ("momentum.json", momentum),
    ("fsdp2.json", fsdp2),
    ("megatron_fsdp.json", megatron_fsdp),
    ("checkpoints.json", checkpoints),
    ("start_up.json", start_up),
)
"""Files of figures, in the order of the page."""
