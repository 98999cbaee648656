"""Measure the rounding error of Newton-Schulz against float64, for docs/reference/accuracy.md.

``--write docs/reference/accuracy.md`` replaces the table of that page, which explains its columns.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_eopt.math import PrecisionT, choose_algorithm, orthogonalize, resolve_coefficients
from megatron_eopt.math.algorithm import AlgorithmT
from megatron_eopt.math.coefficients import Triple

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
BEGIN, END = "<!-- accuracy table: begin -->", "<!-- accuracy table: end -->"


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
    head = f"{name}({len(schedule)}) {kind} | {', '.join(map(str, gram.restarts))}"
    return f"| {head} | {' | '.join(cells)} | {auto.algorithm} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--write", type=Path, help="replace the table in this file")
    arguments = parser.parse_args()
    lines = []
    for row in rows():
        print(row, flush=True)
        lines.append(row)
    if arguments.write:
        text = arguments.write.read_text()
        before, rest = text.split(BEGIN)
        after = rest.split(END)[1]
        table = "\n".join(lines)
        arguments.write.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


if __name__ == "__main__":
    main()
