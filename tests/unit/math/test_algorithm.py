"""The rule of cost and accuracy: FLOPs are counted, errors are measured."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_eopt.math import standard_flops
from megatron_eopt.math.algorithm import FLOAT32_TOLERANCE, choose_algorithm, gram_flops
from megatron_eopt.math.coefficients import coefficient_names, resolve_coefficients, table
from megatron_eopt.math.orthogonalize import orthogonalize
from tests.unit.math.spectra import NAMED, few_rows, one_column, relative_error

F32 = torch.float32
QUINTIC = resolve_coefficients("quintic", 5)
USUAL = [
    (name, steps) for name in coefficient_names() for steps in sorted({5, len(table(name))} - {1})
]


def counted(shape, algorithm, precision):
    """Count FLOPs on the meta device: shapes only, nothing is computed."""
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.empty(shape, device="meta"), algorithm=algorithm, precision=precision)
    return counter.get_total_flops()


@pytest.mark.parametrize("aspect", [1, 2, 4])
@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_counted_flops_equal_the_formulas(aspect, precision):
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
def test_where_auto_leaves_the_standard_iteration_it_is_accurate(precision, name, steps):
    schedule = resolve_coefficients(name, steps)
    m, n = (96, 768) if precision == "highest" else (256, 2048)
    plan = choose_algorithm((m, n), torch.float32, precision, schedule)
    if plan.algorithm == "standard":
        return
    allowed = FLOAT32_TOLERANCE if precision == "highest" else 1.0
    own = {"coefficients": schedule, "steps": steps}
    # where singular values are near zero float32 has digits to spare, 16 bits have not
    for draw in (*NAMED.values(), *([one_column] if precision == "medium" else [])):
        x = draw(m, n, 3)
        reference = orthogonalize(x.double(), **own)
        auto, standard = (
            relative_error(orthogonalize(x, algorithm=a, precision=precision, **own), reference)
            for a in ("auto", "standard")
        )
        assert auto <= allowed * standard


@pytest.mark.parametrize(("name", "steps"), USUAL)
def test_sixteen_bit_auto_stays_bounded_when_few_rows_have_a_gradient(name, steps):
    """Not a named spectrum: here elementwise rounding favours the standard iteration most."""
    x = few_rows(256, 1024, 5)
    exact = orthogonalize(x.double(), coefficients=name, steps=steps)
    result = orthogonalize(x, coefficients=name, steps=steps, precision="medium")
    # the 16-bit error that the standard iteration makes on a decaying spectrum
    assert relative_error(result, exact) < 0.07


OWN = ((2.0, -1.5, 0.5),) * 5
CANS, EXPRESS = (resolve_coefficients(name, 5) for name in ("cans", "polar_express"))
LONG = (512, 8192)


@pytest.mark.parametrize(
    ("algorithm", "shapes", "dtype", "precision", "schedule"),
    [
        # below the break-even, and above it
        ("standard", [(512, 512), (512, 700), (700, 512), (1, 1)], F32, "highest", QUINTIC),
        ("gram", [(512, 2048), (4096, 256)], F32, "highest", QUINTIC),
        # no 16-bit form is accurate
        ("standard", [LONG], F32, "medium", CANS),
        ("standard", [LONG], F32, "medium", EXPRESS),
        # TF32 rounds operands of the standard iteration no more coarsely than Gram's
        ("standard", [LONG], F32, "high", QUINTIC),
        # outside of the study
        ("standard", [(8, 99)], torch.float64, "medium", QUINTIC),
        ("standard", [LONG], F32, "medium", OWN),
        ("standard", [LONG], F32, "highest", OWN),
    ],
)
def test_auto_leaves_the_standard_iteration_where_it_pays(
    algorithm, shapes, dtype, precision, schedule
):
    for shape in shapes:
        assert choose_algorithm(shape, dtype, precision, schedule).algorithm == algorithm


def test_an_own_schedule_restarts_where_gram_is_asked_for():
    assert choose_algorithm((8, 99), F32, "highest", OWN, "gram").restarts == (2, 4)


@pytest.mark.parametrize(("short_side", "dtype"), [(255, torch.float32), (256, torch.float16)])
def test_gram_products_of_small_matrices_have_float32_operands(short_side, dtype):
    plan = choose_algorithm((short_side, 600), F32, "medium", QUINTIC, "gram")
    assert plan.stable(short_side).dtype == dtype
