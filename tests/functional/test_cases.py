"""Every case of ``cases/``: recorded values, resuming, parity."""

import pytest
import torch

from tests.functional import golden
from tests.functional.case_files import load_cases
from tests.functional.comparer import GOLDEN, PARITY, RESUME, differences, largest_difference
from tests.functional.runner import run_golden, run_parity, run_resume

CASES = load_cases()


def params(kind, chosen=lambda case: True, is_long=lambda case: case.long):
    """Cases of one kind, those for the long tier marked."""
    return [
        pytest.param(case, id=case.name, marks=[pytest.mark.long] if is_long(case) else [])
        for case in CASES.values()
        if case.kind == kind and chosen(case)
    ]


def recorded(case, environment):
    """What was recorded for a case; skips where that says nothing about this machine."""
    record = golden.read(case, environment)
    then, here = record["environment"], golden.description(environment)
    if case.same_machine and then["machine"] != here["machine"]:
        pytest.skip(f"recorded on {then['machine']}, this is {here['machine']}, and {case.why}")
    return record


def check_golden(case, environment):
    record = recorded(case, environment)
    metrics = run_golden(case, environment)
    found = differences(record["metrics"], metrics, {**GOLDEN, **case.tolerances})
    assert not found, "\n".join(
        [*found, golden.compare_environments(record["environment"], environment)]
    )
    return largest_difference(record["metrics"], metrics, "lm loss")


@pytest.mark.parametrize("case", params("golden", lambda case: "cpu_gloo" in case.environments))
def test_golden_on_cpus(case, record_property):
    change = check_golden(case, "cpu_gloo")
    record_property("largest relative difference of a loss", f"{change:.1e}")


@pytest.mark.parametrize("case", params("golden", lambda case: "gpu_nccl" in case.environments))
def test_golden_on_gpus(case):
    if torch.cuda.device_count() < case.ranks:
        pytest.skip(f"needs {case.ranks} GPUs, {torch.cuda.device_count()} are here")
    if not golden.path_of(case.name, "gpu_nccl").exists():
        pytest.skip("not recorded: python -m tests.functional.record --environment gpu_nccl")
    check_golden(case, "gpu_nccl")


@pytest.mark.parametrize(
    "case",
    params("golden", lambda case: case.notices, lambda case: case.name != "layer-wise"),
)
def test_recorded_values_tell_a_wrong_setting(case):
    record = recorded(case, "cpu_gloo")
    wrong = run_golden(case, "cpu_gloo", *case.notices)
    assert differences(record["metrics"], wrong, {**GOLDEN, **case.tolerances})


@pytest.mark.parametrize("case", params("resume"))
def test_resume(case, tmp_path):
    whole, resumed = run_resume(case, tmp_path)
    exact = not case.tolerances
    found = differences(whole, resumed, {**RESUME, **case.tolerances}, exact=exact)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("case", params("parity"))
def test_parity(case, record_property):
    runs = run_parity(case)
    first, expected = next(iter(runs.items()))
    assert expected["lm loss"][-1] < expected["lm loss"][0], "nothing was learnt"
    for name, metrics in runs.items():
        found = differences(expected, metrics, {**PARITY, **case.tolerances})
        assert not found, "\n".join([f"{name} against {first}:", *found])
    worst = max(largest_difference(expected, metrics, "lm loss") for metrics in runs.values())
    record_property("largest relative difference of a loss", f"{worst:.1e}")


def test_no_recorded_file_is_without_its_case():
    names = {path.stem for path in golden.FOLDER.rglob("*.json")}
    assert names <= {case.name for case in CASES.values() if case.kind == "golden"}
