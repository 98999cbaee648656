"""The rule of cost and accuracy: FLOPs are counted, errors are measured."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_eopt.math.algorithm import (
    FLOAT32_TOLERANCE,
    AlgorithmT,
    PrecisionT,
    choose_algorithm,
    gram_flops,
    standard_flops,
)
from megatron_eopt.math.coefficients import (
    coefficient_names,
    resolve_coefficients,
    table,
)
from megatron_eopt.math.orthogonalize import orthogonalize
from tests.unit.math.spectra import NAMED, few_rows, one_column, relative_error

QUINTIC = resolve_coefficients("quintic", 5)
USUAL = [
    (name, steps) for name in coefficient_names() for steps in sorted({5, len(table(name))} - {1})
]


def counted(shape: tuple[int, ...], algorithm: AlgorithmT, precision: PrecisionT) -> int:
    """Count FLOPs on the meta device: shapes only, nothing is computed."""
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.empty(shape, device="meta"), algorithm=algorithm, precision=precision)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("aspect", [1, 2, 4])
@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_counted_flops_equal_the_formulas(aspect: int, precision: PrecisionT) -> None:
    m, a, cube = 1024, aspect, 1024**3
    for shape in ((m, a * m), (a * m, m)):
        assert counted(shape, "standard", precision) == 5 * (4 * a + 2) * cube
        plan = choose_algorithm(shape, torch.float32, precision, QUINTIC, "gram")
        expected = gram_flops(*shape, 5, len(plan.restarts))
        assert counted(shape, "gram", precision) == expected
        assert counted((3, *shape), "gram", precision) == 3 * expected
    assert standard_flops(m, a * m, 5) == 5 * (4 * a + 2) * cube
    assert gram_flops(m, a * m, 5, 1) == (8 * a + 28) * cube


@pytest.mark.parametrize("precision", ["highest", "medium"])
@pytest.mark.parametrize(("name", "steps"), USUAL)
def test_where_auto_leaves_the_standard_iteration_it_is_accurate(
    precision: PrecisionT, name: str, steps: int
) -> None:
    schedule = resolve_coefficients(name, steps)
    m, n = (96, 768) if precision == "highest" else (256, 2048)
    plan = choose_algorithm((m, n), torch.float32, precision, schedule)
    if plan.algorithm == "standard":
        return
    # where singular values are near zero float32 has digits to spare, 16 bits have not
    for draw in (*NAMED.values(), *([one_column] if precision == "medium" else [])):
        x = draw(m, n, 3)
        reference = orthogonalize(x.double(), coefficients=schedule, steps=steps)

        def error(
            algorithm: AlgorithmT, x: torch.Tensor = x, reference: torch.Tensor = reference
        ) -> float:
            result = orthogonalize(
                x, coefficients=schedule, steps=steps, algorithm=algorithm, precision=precision
            )
            return relative_error(result, reference)

        allowed = FLOAT32_TOLERANCE if precision == "highest" else 1.0
        assert error("auto") <= allowed * error("standard")


@pytest.mark.parametrize(("name", "steps"), USUAL)
def test_sixteen_bit_auto_stays_bounded_when_few_rows_have_a_gradient(
    name: str, steps: int
) -> None:
    """Not a named spectrum: here elementwise rounding favours the standard iteration most."""
    x = few_rows(256, 1024, 5)
    exact = orthogonalize(x.double(), coefficients=name, steps=steps)
    result = orthogonalize(x, coefficients=name, steps=steps, precision="medium")
    # the 16-bit error that the standard iteration makes on a decaying spectrum
    assert relative_error(result, exact) < 0.07


def test_auto_falls_back_below_the_break_even() -> None:
    for shape in ((512, 512), (512, 700), (700, 512), (1, 1)):
        assert choose_algorithm(shape, torch.float32, "highest", QUINTIC).algorithm == "standard"
    for shape in ((512, 2048), (4096, 256)):
        assert choose_algorithm(shape, torch.float32, "highest", QUINTIC).algorithm == "gram"


def test_auto_keeps_standard_where_no_16_bit_form_is_accurate() -> None:
    for name in ("cans", "polar_express"):
        schedule = resolve_coefficients(name, 5)
        plan = choose_algorithm((512, 8192), torch.float32, "medium", schedule)
        assert plan.algorithm == "standard"
    # TF32 rounds operands of the standard iteration no more coarsely than Gram's
    assert choose_algorithm((512, 8192), torch.float32, "high", QUINTIC).algorithm == "standard"


def test_float64_and_schedules_outside_the_study_are_standard() -> None:
    assert choose_algorithm((8, 99), torch.float64, "medium", QUINTIC).algorithm == "standard"
    own = ((2.0, -1.5, 0.5),) * 5
    for precision in ("medium", "highest"):
        plan = choose_algorithm((512, 8192), torch.float32, precision, own)
        assert plan.algorithm == "standard"
    assert choose_algorithm((8, 99), torch.float32, "highest", own, "gram").restarts == (2, 4)
