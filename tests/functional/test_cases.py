"""Every case of ``cases/``: recorded values, resuming, parity."""

import pytest

from tests.functional import comparer, golden
from tests.functional.case_files import Variant, load_cases
from tests.functional.comparer import RESUME, differences, differences_from, tolerances_of
from tests.functional.runner import run_measured, run_resume, run_variant

CASES = load_cases()


def params(kind, chosen=lambda case: True, is_long=lambda case: case.long):
    """Cases of one kind, those for the long tier marked."""
    return [
        pytest.param(case, id=case.name, marks=[pytest.mark.long] if is_long(case) else [])
        for case in CASES.values()
        if case.kind == kind and chosen(case)
    ]


@pytest.mark.tested_release
@pytest.mark.parametrize("case", params("golden", lambda case: "cpu_gloo" in case.environments))
def test_golden_on_cpus(case):
    """On GPUs the GPU check compares."""
    found = run_measured(case, "cpu_gloo", seed=None)
    wrong = differences_from(golden.read(case, "cpu_gloo"), found)
    assert not wrong, "\n".join(wrong)


@pytest.mark.tested_release
@pytest.mark.parametrize(
    "case", params("golden", lambda case: case.notices, lambda case: case.name != "layer-wise")
)
def test_recorded_values_tell_a_wrong_setting(case):
    assert differences_from(golden.read(case, "cpu_gloo"), run_variant(case, Variant(case.notices)))


@pytest.mark.parametrize("case", params("resume"))
def test_resume(case, tmp_path):
    whole, rests = run_resume(case, tmp_path)
    if case.is_recorded:
        spread = golden.read(case, "cpu_gloo")["spread"]
        steps = len(whole["lm loss"])
        tolerances = tolerances_of({name: values[-steps:] for name, values in spread.items()})
    else:
        tolerances = RESUME
    for form, resumed in zip(case.formats[1:], rests, strict=True):
        found = differences(whole, resumed, tolerances, exact=not case.is_recorded)
        assert not found, "\n".join([form, *found])


@pytest.mark.parametrize("case", params("parity"))
def test_parity(case, record_property):
    tolerances = tolerances_of(golden.read(case, "cpu_gloo")["spread"]) | dict(case.tolerances)
    runs = {name: run_variant(case, variant) for name, variant in case.variants.items()}
    first, expected = next(iter(runs.items()))
    assert expected["lm loss"][-1] < expected["lm loss"][0], "nothing was learnt"
    for name, metrics in runs.items():
        found = differences(expected, metrics, tolerances)
        assert not found, "\n".join([f"{name} against {first}:", *found])
    worst = max(
        comparer.largest_difference(expected, metrics, "lm loss") for metrics in runs.values()
    )
    record_property("largest relative difference of a loss", f"{worst:.1e}")


def test_no_recorded_file_is_without_its_case():
    names = {path.stem for path in golden.FOLDER.rglob("*.json")}
    assert names <= {case.name for case in CASES.values() if case.is_recorded}
