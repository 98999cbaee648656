"""Makes docs/reference/recipes.md: every recipe with its sources and its plan.

``python -m scripts.reference_pages`` writes the page, and ``--plans`` makes the plans again.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.tools.plan.cost import bytes_sent
from megatron_eopt.tools.plan.machine import MACHINES
from megatron_eopt.tools.plan.planning import plan
from megatron_eopt.tools.recipe import NAMES, Recipe, recipe, words_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "recipes.md"
FILES = "../../megatron_eopt/tools/recipes"

HEAD = """# Recipes

This page is for anyone who trains one of these models, or one like it, with Megatron. A recipe is a
list of Megatron's flags for the architecture, optimizer and schedule, with the source of each.
`python -m scripts.reference_pages` writes this page from the YAML files in
[megatron_eopt/tools/recipes](../../megatron_eopt/tools/recipes).

| Recipe | Model | Parameters | Published optimizer |
|---|---|---:|---|
"""

USE = """
## Use a recipe

```bash
megatron-eopt recipe                      # lists the recipes
megatron-eopt recipe moonlight            # prints the flags of one
megatron-eopt plan --model moonlight      # predicts memory, traffic and time of its optimizer
```

Try it first, in this repository. This trains a small model of the same kind on random data for ten
steps, in about a minute on a CPU:

```bash
torchrun --nproc-per-node 2 scripts/pretrain_gpt.py $(megatron-eopt recipe kimi-k2 --small)
```

For the whole model, start one process for each GPU of the recipe's layout. Add your data and
tokenizer, here to Megatron-LM's `pretrain_gpt.py`:

```bash
torchrun --nnodes 8 --nproc-per-node 8 -m megatron_eopt.launch pretrain_gpt.py \\
    $(megatron-eopt recipe moonlight) --data-path my-corpus --split 99,1,0 \\
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model moonshotai/Moonlight-16B-A3B \\
    --eval-interval 1000 --eval-iters 10 --save-interval 1000 --save checkpoints --load checkpoints
```

A flag after the recipe replaces the recipe's, such as `--global-batch-size 512` or
`--tensor-model-parallel-size 4`. Plans can be changed, too:

```bash
megatron-eopt plan --model qwen3-8b --num-layers 12 --dp 16
```

Choose the flags that depend on your GPUs yourself: `--moe-grouped-gemm`, `--fp8-format`,
`--recompute-granularity`, `--overlap-grad-reduce`, `--overlap-param-gather`.

## How to read them

* **Ours** marks a setting that the authors did not publish, with the reason for its value.
* Models published with AdamW, or without their optimizer, get Moonlight's Muon settings. With
  `--muon-scale-mode adamw_rms`, updates are as large as AdamW's, so AdamW's learning rate and
  weight decay can stay. Add `--optimizer adam` to train with AdamW.
* If you change the batch size, tune the learning rate again.
* Plans show the busiest GPU, an H100, without activations. Times are
  [predicted](../how_to/planning.md#how-seconds-are-predicted). Gathering the updated parameters
  takes as long with Adam; steps leave it out, "Sent" includes it.

Every recipe passes Megatron's argument checks at its layout, and has the published number of
parameters within 2 %. Its small model trains on a CPU (`tests/functional/test_recipes.py`). No
whole model was trained with these flags here.

## In other trainers

Of `EmergingOptimizerConfig`, as the authors
[published them](../../tests/unit/routing/published.yaml). Learning rates of GLM-5.2 and Kimi K3
were not published.

* [DeepSeek-V4](https://arxiv.org/abs/2606.19348): `muon_coefficient_type="deepseekv4"`,
  `muon_num_ns_steps=10` (8 + 2), `muon_momentum=0.95`, `muon_nesterov=True`,
  `muon_scale_mode="spectral"`, `muon_extra_scale_factor=0.18`
* [GLM-5](https://arxiv.org/abs/2602.15763), GLM-5.2: `muon_split_per_head=True`, one matrix per
  head for up projections of queries, keys and values
* [Kimi K3](https://arxiv.org/abs/2607.24653): `muon_split_per_head=True`, one matrix per head for
  queries, keys and values, also of linear attention (KDA)

Projections of hyper-connections and the indexer get Muon; so do those with one row per head (KDA's
`b_proj`), as one matrix. Biases and gates of hyper-connections get Adam.
"""

COLUMNS = (
    "| Weights and gradients | Main weights and state | Sent | Muon's step | Adam's step "
    "| Gathering |",
    "|---:|---:|---:|---:|---:|---:|",
)


def numbers(name: str) -> str:
    """Return a table row: memory, communication and time of a recipe's optimizer at its layout."""
    one, machine = recipe(name), MACHINES["H100"]
    config = EmergingOptimizerConfig(
        lr=1e-3, bf16=True, use_distributed_optimizer=True, **one.optimizer_settings
    )
    model = one.architecture()
    tokens = one.flags["global-batch-size"] * model.seq_length
    found = plan(model, one.planned(), machine, config, tokens=tokens)
    memory, calls = found.report.memory, found.report.collectives
    sent = sum(bytes_sent(call) * count for call, count in calls.items())
    sizes = (memory.weights + memory.gradients, memory.main_weights + memory.state, sent)
    seconds = (found.times.step, found.adam.step, found.times.gather)
    cells = [f"{size / 2**30:.1f} GiB" for size in sizes]
    cells += [f"{1e3 * value:.1f} ms" for value in seconds]
    return f"| {' | '.join(cells)} |"


def flags(group: Mapping[str, Any]) -> str:
    """Return a group's flags as the trainer takes them."""
    pairs = {flag: value for flag, value in group["flags"].items() if flag != "data-parallel-size"}
    texts = (" ".join(words_of(flag, value)) for flag, value in pairs.items())
    return " ".join(f"`{text}`" for text in texts)


def settings(one: Recipe) -> Iterable[str]:
    """Yield the lines of a table of all flags with their sources."""
    yield "| Source | Flags |"
    yield "|---|---|"
    for group in one.published:
        name, comma, place = group["at"].partition(",")
        yield f"| [{name}]({one.sources[name]}){comma}{place} | {flags(group)} |"
    for group in one.ours:
        yield f"| **Ours**: {group['why']} | {flags(group)} |"
    yield f"| Layout: {one.layout['why']} | {flags(one.layout)} |"


def section(name: str, row: str) -> str:
    """Return the page's section on one recipe."""
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
        lines += [f"* Recipes of other sizes: {', '.join(links)}."]
    return "\n".join(lines) + "\n"


def page(row_of: Callable[[str], str]) -> str:
    """Return the page; ``row_of`` gives the plan's table row of a recipe's name."""
    rows = []
    for name, one in ((name, recipe(name)) for name in NAMES):
        size = f"{one.parameters / 1e9:,.4g} billion"
        rows.append(f"| `{name}` | {one.title} | {size} | {one.optimizer} |\n")
    whole = [name for name in NAMES if recipe(name).base is None]
    sections = (section(name, row_of(name)) for name in whole)
    return HEAD + "".join(rows) + USE + "".join(f"\n{text}" for text in sections)


def row_on_page(name: str) -> str:
    """Return the plan's row that the page has of a recipe; a recipe without one is planned."""
    _, found, rest = PAGE.read_text().partition(f"`megatron-eopt plan --model {name}`, ")
    return rest.splitlines()[4] if found else numbers(name)
