"""Makes docs/reference/head_to_head.md from docs/benchmarks/head_to_head.json.

python -m benchmarks.head_to_head.page
"""

import statistics
from typing import Any

from benchmarks.about import table
from benchmarks.head_to_head.models import TASKS
from benchmarks.head_to_head.results import FACTOR
from benchmarks.page import machine, read
from benchmarks.predicted import FIGURES

TARGET = FIGURES.parent / "reference" / "head_to_head.md"
NAMES = {"ours": "ours", "torch": "torch's pair", "adamw": "AdamW"}

PAGE = """\
# Head to head with torch.optim.Muon

How [`build_optimizer`](../how_to/pytorch.md) compares with `torch.optim.Muon`, and with AdamW
alone, in a plain PyTorch loop. In short:

{short}
* **Between both Muons**, losses differ less than between seeds. Our optimizer's step is faster on
  the ViT and the GPT. It is slower on the convolutional net, since convolutions get Muon, too.
* **At equal settings**, both Muons differ by rounding only.

The models are tiny and the runs short. They say nothing about large models.

## Losses and times

{results}

* **Held-out loss** is the mean of three seeds, with their range, in nats per image or byte.
* **Steps** are how many of {steps} it takes until the mean loss is AdamW's final one.
* **Times** are medians of {rounds} steps, in turn, on {machine}.
  Other work ran beside them: compare them within a model only.

## What was compared

| optimizer | weights of hidden linear layers | convolutions, but the first | the rest |
| --- | --- | --- | --- |
| ours | our Muon | our Muon | our AdamW |
| torch's pair | `torch.optim.Muon` | `torch.optim.AdamW` | `torch.optim.AdamW` |

`torch.optim.Muon` takes 2-D weights only, so convolutions stay with AdamW. Both Muons have Nesterov
momentum and updates of AdamW's size (`adamw_rms`, `match_rms_adamw`), and multiply in 16 bits. Each
has its default coefficients: `quintic` here, and `simple` in torch. On the ViT and the GPT, nothing
else differs.

All three have the same initial weights, batches, clipping at norm 1 and weight decay of 0.1, but
none of norms and biases. One learning rate for all parameters rises over {warm_up} steps, then
falls linearly to zero. Adam's betas are 0.9 and 0.95: the usual 0.999 averages over more steps than
a run has.

| model | parameters | of hidden linear layers | data |
| --- | ---: | ---: | --- |
{models}

* **Images** are 36 letters and digits of five fonts, turned, scaled, shifted and noisy, of 20 x 20
  pixels. Each is new. A batch has 64.
* **Text** is the source code of Python's standard library: 16 sequences of 64 bytes a batch. Files
  of the held-out loss are not trained on.

Learning rates were tuned with seed 0, on a grid of factor {factor} that grew until the best rate
was inside. Seeds 1 to 3, which tuning did not see, then trained at that rate.

## At equal settings

Here both Muons have torch's coefficients, scale and epsilon, and the same weights and gradients.
The table shows how far the GPT's hidden weights are from a float64 run of torch's Muon after ten
steps, relative to how far that run has moved them:

{deviations}

`torch.optim.Muon` always multiplies in bfloat16. For the other types, the benchmark replaces that
type. In this package, `muon_fp32_matmul_prec="highest"` multiplies in float32.
[From torch.optim.Muon](../how_to/choosing.md#from-torchoptimmuon) lists equal settings.

## Repeat it

```bash
python -m benchmarks.head_to_head --json docs/benchmarks/head_to_head.json
```

It takes 40 minutes on two CPU cores, and continues where it was stopped. Then
`python -m benchmarks.head_to_head.page` writes this page from
[the figures](../benchmarks/head_to_head.json), which have all losses of the grids.
"""


def page() -> str:
    """Return the whole page."""
    figures = read("head_to_head")
    models = figures["models"]
    return PAGE.format(
        short="\n".join(bullet(name, model, figures) for name, model in models.items()),
        results=of_results(models),
        steps=figures["steps"],
        warm_up=figures["steps"] // 20,
        rounds=figures["rounds"],
        factor=FACTOR,
        machine=machine(figures),
        models=of_models(models),
        deviations=of_deviations(figures["deviations"]),
    )


def bullet(name: str, model: dict[str, Any], figures: dict[str, Any]) -> str:
    """Return the result of a model in a sentence."""
    mine, theirs, plain = (
        f"{statistics.fmean(arm['losses']):.2f}" for arm in model["arms"].values()
    )
    steps = model["arms"]["ours"]["steps_to_adamw"]
    reached = f"{steps:.0f} of {figures['steps']} steps" if steps else "no step"
    return (
        f"* **{TASKS[name].title}**: the held-out loss is {mine} for ours, {theirs} for torch's\n"
        f"  pair and {plain} for AdamW. Ours reaches AdamW's loss after {reached}."
    )


def of_results(models: dict[str, Any]) -> str:
    """Return the table of losses and times."""
    rows = []
    for name, model in models.items():
        for arm, found in model["arms"].items():
            losses, steps, times = found["losses"], found["steps_to_adamw"], found["seconds"]
            lowest, highest = min(losses), max(losses)
            rows.append(
                [
                    *(TASKS[name].title, NAMES[arm], f"{found['rate']:g}"),
                    f"{statistics.fmean(losses):.3f} ({lowest:.3f} .. {highest:.3f})",
                    "never" if steps is None else f"{steps:.0f}",
                    *(f"{1e3 * times[kind]:.1f}" for kind in ("step", "optimizer")),
                ]
            )
    head = "model | optimizer | rate: | held-out loss: | steps: | ms a step: | optimizer's ms:"
    return table(head, rows)


def of_models(models: dict[str, Any]) -> str:
    """Return the rows of the table of models."""
    kinds = {"vit": "images", "convnet": "images", "gpt": "text"}
    return "\n".join(
        f"| {TASKS[name].title} | {model['parameters']:,} | {model['hidden']:,} | {kinds[name]} |"
        for name, model in models.items()
    )


def of_deviations(figures: dict[str, dict[str, float]]) -> str:
    """Return the table of relative deviations."""
    rows = [
        [run, *(f"{by[run]:.1e}" for by in figures.values())]
        for run in next(iter(figures.values()))
    ]
    return table(
        " | ".join(["optimizer, products in", *(f"`{scale}`:" for scale in figures)]), rows
    )


if __name__ == "__main__":
    TARGET.write_text(page())
