"""What a training run prints about itself, as numbers."""

import re

_NUMBER = r"([-+.\dEe]+|nan|inf)"
_OF_A_STEP = {
    "lm loss": "lm loss",
    "grad norm": "grad norm",
    "params norm": "params norm",
    "learning rate": "learning rate",
    "skipped": "number of skipped iterations",
    "nan": "number of nan iterations",
}
METRICS = (*_OF_A_STEP, "validation loss")
"""Names of all metrics. One value a step; the validation loss once, after the last."""

type Metrics = dict[str, list[float]]


def metrics_of(output: str) -> Metrics:
    """Return every metric's values in the order of steps; ValueError if there are none."""
    lines = [line for line in output.splitlines() if re.match(r".*\] iteration +\d+/", line)]
    if not lines:
        raise ValueError(f"no training step in the output:\n{output[-2000:]}")
    found: Metrics = {name: [] for name in METRICS}
    for line in lines:
        for name, printed in _OF_A_STEP.items():
            match = re.search(rf"\| {printed}: +{_NUMBER} \|", line)
            if match is None:
                raise ValueError(f"no {printed!r} in: {line}")
            found[name].append(float(match[1]))
    _take_apart_the_second(found)
    validation = re.findall(rf"on validation set \| lm loss value: {_NUMBER}", output)
    found["validation loss"] = [float(value) for value in validation]
    return found


def _take_apart_the_second(found: Metrics) -> None:
    """Undo that the trainer's second line covers the first two steps of a process."""
    if len(found["skipped"]) < 2:
        return
    for name in ("skipped", "nan"):
        found[name][1] -= found[name][0]
    if found["skipped"][:2] == [0.0, 0.0]:
        first, mean = found["lm loss"][:2]
        found["lm loss"][1] = round(2 * mean - first, 6)


def first_values(metrics: Metrics, values: int) -> Metrics:
    """Return the metrics of the first so many steps; one more is the validation loss."""
    first = {name: found[:values] for name, found in metrics.items()}
    if values <= len(metrics["lm loss"]):
        first["validation loss"] = []
    return first


def last_steps(metrics: Metrics, steps: int) -> Metrics:
    """Return the metrics of the last so many steps, with the validation loss after them."""
    last = {name: values[-steps:] for name, values in metrics.items()}
    return last | {"validation loss": metrics["validation loss"]}
