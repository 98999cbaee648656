"""Write docs/reference/recipes.md: every recipe, its sources, and what a plan says of it.

python scripts/recipe_pages.py          writes the page
python scripts/recipe_pages.py --check  exits with 1 if the page is not what recipes and planner say
"""

import itertools
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.plan.cost import bytes_sent
from megatron_eopt.plan.machine import MACHINES
from megatron_eopt.plan.planning import plan
from megatron_eopt.recipe import NAMES, Recipe, recipe

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "recipes.md"
FILES = "../../megatron_eopt/recipes"

HEAD = """# Recipes

For anyone who trains one of these models, or one like it, with Megatron. A recipe has the flags of
its architecture, optimizer and schedule, and says where each was published. This page is written by
`python scripts/recipe_pages.py` from the YAML files in
[megatron_eopt/recipes](../../megatron_eopt/recipes).

| Recipe | Model | Parameters | Published optimizer |
|---|---|---:|---|
"""

USE = """
## Use a recipe

```bash
megatron-eopt recipe                      # which recipes there are
megatron-eopt recipe moonlight            # the flags of one
megatron-eopt plan --model moonlight      # memory, traffic and time of its optimizer
```

Try it first. This trains a small model of the same kind on random data for ten steps, in seconds
and on a CPU. Latent attention, experts and QK-clip stay, and only the sizes are small:

```bash
torchrun --nproc-per-node 2 scripts/pretrain_gpt.py $(megatron-eopt recipe kimi-k2 --small)
```

For the whole model, start as many processes as the recipe's layout has GPUs, and add your data and
tokenizer:

```bash
torchrun --nnodes 8 --nproc-per-node 8 -m megatron_eopt.launch pretrain_gpt.py \\
    $(megatron-eopt recipe moonlight) --data-path my-corpus --split 99,1,0 \\
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model moonshotai/Moonlight-16B-A3B \\
    --eval-interval 1000 --eval-iters 10 --save-interval 1000 --save checkpoints --load checkpoints
```

A flag after the recipe replaces the recipe's: `--global-batch-size 512`, `--train-iters 20000`, or
the sizes of another layout. A plan takes the same changes: `megatron-eopt plan --model qwen3-8b
--num-layers 12 --dp 16`. If you give a plan any size of a layout, it uses yours alone.

Flags of kernels and memory depend on your GPUs and are left to you: `--moe-grouped-gemm`,
`--fp8-format`, `--recompute-granularity`, `--overlap-grad-reduce`, `--overlap-param-gather`.

## How to read them

* **Ours** marks a setting that the authors did not publish, with the reason for its value.
* Models published with AdamW, or without their optimizer, get Moonlight's settings of Muon. Its
  updates are as large as AdamW's (`--muon-scale-mode adamw_rms`: 0.2 times the root of the larger
  dimension), so that AdamW's learning rate and weight decay carry over. Add `--optimizer adam` to
  train with AdamW.
* A learning rate belongs to the batch beside it.
* A plan is of the busiest of as many H100, without activations. Its seconds are
  [predicted](../how_to/planning.md#how-seconds-are-predicted). "Sent" is what that GPU sends in a
  step of the optimizer, gathering parameters included. Adam gathers them, too.

Every recipe passes Megatron's own checks of arguments at its layout. It has the published number of
parameters within 2 %, and its small model trains on a CPU (`tests/functional/test_recipes.py`). No
whole model was trained with these flags here.
"""

COLUMNS = (
    "| Weights and gradients | Optimizer state | Sent | Muon's step | Adam's step | Gathering |",
    "|---:|---:|---:|---:|---:|---:|",
)


def numbers(name: str) -> str:
    """Return the row of a table that says what the optimizer takes at a recipe's layout."""
    one, machine = recipe(name), MACHINES["H100"]
    config = EmergingOptimizerConfig(
        optimizer="muon", lr=1e-3, bf16=True, use_distributed_optimizer=True
    )
    found = plan(one.architecture(), one.planned(), machine, config, tokens=2**22)
    memory, calls = found.report.memory, found.report.collectives
    sent = sum(bytes_sent(call) * count for call, count in calls.items())
    sizes = (memory.weights + memory.gradients, memory.main_weights + memory.state, sent)
    seconds = (found.times.step, found.adam.step, found.times.gather)
    cells = [f"{size / 2**30:.1f} GiB" for size in sizes]
    cells += [f"{1e3 * value:.1f} ms" for value in seconds]
    return f"| {' | '.join(cells)} |"


def flags(group: Mapping[str, Any]) -> str:
    """Return the flags of a group as the trainer takes them."""
    pairs = {flag: value for flag, value in group["flags"].items() if flag != "data-parallel-size"}
    texts = (f"--{flag}" if value is True else f"--{flag} {value}" for flag, value in pairs.items())
    return " ".join(f"`{text}`" for text in texts)


def settings(one: Recipe) -> Iterable[str]:
    """Yield the lines of a table of all flags with their sources."""
    yield "| Where it stands | Flags |"
    yield "|---|---|"
    for group in one.published:
        name, comma, place = group["at"].partition(",")
        yield f"| [{name}]({one.sources[name]}){comma}{place} | {flags(group)} |"
    for group in one.ours:
        yield f"| **Ours**: {group['why']} | {flags(group)} |"
    yield f"| Layout: {one.layout['why']} | {flags(one.layout)} |"


def section(name: str, row: str) -> str:
    """Return what the page says of one recipe."""
    one, ranks = recipe(name), recipe(name).planned().world_size
    lines = [f"## {one.title}", "", f"{one.summary} Published optimizer: {one.optimizer}.", ""]
    launch = f"torchrun --nnodes {ranks // 8} --nproc-per-node 8 -m megatron_eopt.launch"
    lines += ["```bash", f"{launch} pretrain_gpt.py $(megatron-eopt recipe {name}) ...", "```", ""]
    lines += [*settings(one), ""]
    lines += [f"`megatron-eopt plan --model {name}`, {ranks:,} GPUs:", "", *COLUMNS, row, ""]
    lines += [f"* {note}" for note in one.notes]
    others = [other for other in NAMES if recipe(other).base == name]
    if others:
        links = (f"[`{other}`]({FILES}/{other}.yaml)" for other in others)
        lines += [f"* Other sizes have recipes of their own: {', '.join(links)}."]
    return "\n".join(lines) + "\n"


def page(row_of: Callable[[str], str]) -> str:
    """Return the whole page, with the plans' rows that a function gives for names."""
    rows = []
    for name, one in ((name, recipe(name)) for name in NAMES):
        size = f"{one.parameters / 1e9:,.4g} billion"
        rows.append(f"| `{name}` | {one.title} | {size} | {one.optimizer} |\n")
    whole = [name for name in NAMES if recipe(name).base is None]
    sections = (section(name, row_of(name)) for name in whole)
    return HEAD + "".join(rows) + USE + "".join(f"\n{text}" for text in sections)


def rows_of_page() -> dict[str, str]:
    """Return the plans' rows on the page as it is, by recipe."""
    lines = PAGE.read_text().splitlines()
    places = [number for number, line in enumerate(lines) if line == COLUMNS[1]]
    whole = (name for name in NAMES if recipe(name).base is None)
    return {name: lines[place + 1] for name, place in zip(whole, places, strict=True)}


def main() -> int:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    made = page(numbers)
    if "--check" in sys.argv:
        changed = itertools.zip_longest(PAGE.read_text().splitlines(), made.splitlines())
        print(*(f"- {old}\n+ {new}" for old, new in changed if old != new), sep="\n")
        return int(PAGE.read_text() != made)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
