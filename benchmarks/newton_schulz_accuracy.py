"""Measure rounding errors of Newton-Schulz, and where it diverges, for docs/reference/accuracy.md.

``--write docs/reference/accuracy.md`` replaces the tables of that page, which explains them.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_eopt.math import (
    PrecisionT,
    choose_algorithm,
    orthogonalize,
    resolve_coefficients,
    sound_precision,
)
from megatron_eopt.math.algorithm import AlgorithmT, IterationPlan
from megatron_eopt.math.coefficients import Triple, coefficient_names, largest
from megatron_eopt.math.newton_schulz import (
    FLOAT16_NORM,
    iterate_gram,
    iterate_standard,
    normalize,
    rescaled,
)

SCHEDULES: tuple[tuple[str, int], ...] = (
    ("simple", 5),
    ("quintic", 5),
    ("polar_express", 5),
    ("polar_express", 8),
    ("cans", 5),
    ("aol", 4),
    ("aol", 5),
    ("deepseekv4", 10),
)
PRECISIONS: tuple[PrecisionT, ...] = ("highest", "medium")
SHAPE = (512, 2048)
STEPS = range(1, 13)
SIDE = 256
"""Of matrices of the second table, the smallest with 16-bit products in the Gram form."""
FORMS = {
    "float32, standard": ("standard", torch.float32),
    "float32, Gram": ("gram", torch.float32),
    "bfloat16, standard": ("standard", torch.bfloat16),
    "float16, Gram": ("gram", torch.float16),
}


def spectra(m: int, n: int) -> dict[str, Tensor]:
    """Return test matrices with different spectra, by name."""
    generator = torch.Generator().manual_seed(7)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    left = torch.linalg.qr(normal(m, m).double())[0]
    right = torch.linalg.qr(normal(n, m).double())[0]
    decaying = (left * torch.logspace(0, -3, m, dtype=torch.float64)) @ right.T
    signal, noise = normal(m, m // 8) @ normal(m // 8, n), normal(m, n)
    rows = 1e-4 * normal(m, n)
    rows[:3] = normal(3, n)
    column = normal(m, n)
    column[:, 1:] *= 1e-2 / (n - 1) ** 0.5
    return {
        "Gaussian": normal(m, n),
        "decaying to 1e-3": decaying.float(),
        "rank m/8 + noise": signal / signal.norm() + 1e-3 * noise / noise.norm(),
        "three rows": rows,
        "one column": column,
    }


def rows() -> Iterator[str]:
    matrices = spectra(*SHAPE)
    yield f"| coefficients (steps) | restarts | {' | '.join(matrices)} | auto |"
    yield "|---" * (len(matrices) + 3) + "|"
    for name, steps in SCHEDULES:
        schedule = resolve_coefficients(name, steps)
        exact = {
            key: orthogonalize(x.double(), coefficients=schedule, steps=steps)
            for key, x in matrices.items()
        }
        for precision in PRECISIONS:
            yield _row(name, schedule, precision, matrices, exact)


def _row(
    name: str,
    schedule: tuple[Triple, ...],
    precision: PrecisionT,
    matrices: dict[str, Tensor],
    exact: dict[str, Tensor],
) -> str:
    def error(key: str, algorithm: AlgorithmT) -> float:
        result = orthogonalize(
            matrices[key],
            coefficients=schedule,
            steps=len(schedule),
            algorithm=algorithm,
            precision=precision,
        )
        return float((result.double() - exact[key]).norm() / exact[key].norm())

    gram = choose_algorithm(SHAPE, torch.float32, precision, schedule, "gram")
    auto = choose_algorithm(SHAPE, torch.float32, precision, schedule)
    cells = [f"{error(key, 'standard'):.1e}, {error(key, 'gram'):.1e}" for key in matrices]
    kind = "float32" if precision == "highest" else "bfloat16, float16"
    if sound_precision(schedule, precision) != precision:
        kind = "float32 for 16 bits"
    head = f"{name}({len(schedule)}) {kind} | {', '.join(map(str, gram.restarts))}"
    return f"| {head} | {' | '.join(cells)} | {auto.algorithm} |"


def degenerate(m: int, n: int) -> dict[str, Tensor]:
    """Return matrices on which an iteration can diverge, by name."""
    generator = torch.Generator().manual_seed(7)
    gaussian, noise = (torch.randn(m, n, generator=generator) for _ in range(2))
    rank_1 = torch.randn(m, 1, generator=generator) @ torch.randn(1, n, generator=generator)
    column = gaussian.clone()
    column[:, 1:] *= 1e-2 / max(n - 1, 1) ** 0.5
    return {
        "ones": torch.ones(m, n),
        "rank 1": rank_1,
        "rank 1 + noise": rank_1 / rank_1.norm() + 1e-3 * noise / noise.norm(),
        "ones + noise": torch.ones(m, n) + 1e-3 * noise,
        "one column": column,
        "identity": torch.eye(m, n),
        "zeros": torch.zeros(m, n),
        "1e25": 1e25 * gaussian,
        "1e-30": 1e-30 * gaussian,
    }


def largest_value(matrix: Tensor) -> float:
    """Return the largest singular value; inf if an entry is not finite."""
    finite = bool(matrix.isfinite().all())
    return float(torch.linalg.matrix_norm(matrix.double(), 2)) if finite else math.inf


def in_form(x: Tensor, schedule: tuple[Triple, ...], form: str) -> Tensor:
    """Run the iteration in one of :data:`FORMS`, even where ``orthogonalize`` would not."""
    algorithm, dtype = FORMS[form]
    norm, scale = 1.0, 1.0
    if dtype == torch.float16:
        schedule, scale = rescaled(schedule, norm := FLOAT16_NORM)
    x = normalize(x, 1e-7, dtype, norm=norm)
    if algorithm == "standard":
        return iterate_standard(x, schedule)
    restarts = tuple(range(2, len(schedule), 2))
    return iterate_gram(x, schedule, IterationPlan("gram", restarts, dtype)).float() / scale


def rows_of_bounds() -> Iterator[str]:
    matrices = [*degenerate(SIDE, SIDE).values(), *degenerate(1, SIDE).values()]
    yield f"| coefficients | exact | {' | '.join(FORMS)} | `auto` with `medium` |"
    yield "|---" * (len(FORMS) + 3) + "|"

    def worst(compute: Callable[[Tensor, tuple[Triple, ...]], Tensor]) -> str:
        found = [largest_value(compute(x, triples)) for triples in schedules for x in matrices]
        return f"{max(found):.3g}"

    def by_auto(x: Tensor, triples: tuple[Triple, ...]) -> Tensor:
        return orthogonalize(x, coefficients=triples, steps=len(triples), precision="medium")

    for name in coefficient_names():
        schedules = [resolve_coefficients(name, steps) for steps in STEPS]
        cells = [f"{max(map(largest, schedules)):.3g}"]
        cells += [worst(lambda x, triples, form=form: in_form(x, triples, form)) for form in FORMS]
        yield f"| {name} | {' | '.join([*cells, worst(by_auto)])} |"


TABLES = {"accuracy": rows, "bounds": rows_of_bounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--write", type=Path, help="replace the tables in this file")
    arguments = parser.parse_args()
    for name, make in TABLES.items():
        lines = []
        for row in make():
            print(row, flush=True)
            lines.append(row)
        if arguments.write:
            begin, end = (f"<!-- {name} table: {edge} -->" for edge in ("begin", "end"))
            before, rest = arguments.write.read_text().split(begin)
            table, after = "\n".join(lines), rest.split(end)[1]
            arguments.write.write_text(f"{before}{begin}\n{table}\n{end}{after}")


if __name__ == "__main__":
    main()
