"""What the cases are checked with: records, printed metrics, tolerances, recorded files."""

import math
from dataclasses import replace

import pytest

from tests.functional import golden
from tests.functional.case_files import Case, CaseError, Variant, load_cases
from tests.functional.comparer import (
    AS_PRINTED,
    FACTOR,
    LARGEST,
    RESUME,
    UNBOUNDED,
    differences,
    largest_difference,
    spread_of,
    tolerances_of,
    values_compared,
)
from tests.functional.metrics import METRICS, first_values, last_steps, metrics_of
from tests.functional.record import main

GOOD = "a:\n  kind: golden\n  flags: --optimizer 'muon'\n"
CASE = Case("a", "golden", ("--optimizer", "muon"))
STEP = (
    " [2026-01-01 00:00:00] iteration {:8d}/ 2 | consumed samples: 8 | learning rate: 8.3E-03 |"
    " lm loss: {} | loss scale: 1.0 | grad norm: 1.136 | params norm: 19.112 |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
OUTPUT = (
    STEP.format(1, "5.5E+00")
    + STEP.format(2, "5.25E+00")
    + " validation loss at iteration 2 on validation set | lm loss value: 4.5E+00 | x\n"
)
METRICS_OF_TWO_STEPS = {
    "lm loss": [5.5, 5.0],  # the second line's is the mean of the first two
    "grad norm": [1.136, 1.136],
    "params norm": [19.112, 19.112],
    "learning rate": [8.3e-3, 8.3e-3],
    "skipped": [0.0, 0.0],
    "nan": [0.0, 0.0],
    "validation loss": [4.5],
}


def load(tmp_path, *texts):
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.yaml").write_text(text)
    return load_cases(tmp_path)


def test_a_record(tmp_path):
    assert load(tmp_path, GOOD) == {"a": CASE}
    text = (
        "b:\n  kind: parity\n  ranks: 4\n  long: true\n  flags: ''\n  tolerances: {nan: 0.1}\n"
        "  why: it\n  variants: {x: {}, y: {flags: --bf16, trainer: stock}}\n"
    )
    assert load(tmp_path, text)["b"] == Case(
        "b", "parity", (), 4, True, tolerances={"nan": 0.1}, why="it",
        variants={"x": Variant(), "y": Variant(("--bf16",), "stock")},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ("  rank: 2", r"0.yaml: a: unknown keys \['rank'\]"),
        ("  kind: resume", "kind is given twice"),
        ("  ranks: two", "a: ranks: must be a positive whole number"),
        ("  ranks: 0", "must be a positive whole number"),
        ("  ranks: true", "must be a positive whole number"),
        ("  long: 1", "must be true or false"),
        ("  environments: []", "must be a list out of"),
        ("  environments: [tpu]", "must be a list out of"),
        ("  why: so", "go with 'why'"),
        ("b: {kind: parity, flags: '', tolerances: {lm loss: 0.1}}", "go with 'why'"),
        ("  same_machine: true", r"unknown keys \['same_machine'\]"),
        ("  tolerances: {lm loss: 0.1}\n  why: so", "'tolerances' is for parity cases"),
        ("b: {kind: parity, flags: '', why: so, tolerances: {loss: 0.1}}", "'loss' is none of"),
        (
            "b: {kind: parity, flags: '', why: so, tolerances: {lm loss: 1e-3}}",
            "'1e-3' is no fraction",
        ),
        ("b: {kind: parity, flags: '', why: so, tolerances: {lm loss: 2.0}}", "2.0 is no fraction"),
        ("  resumed_flags: --bf16", "'resumed_flags' is for resume cases"),
        ("  variants: {x: {}, y: {}}", "'variants' is for parity cases"),
        ("  notices: [--bf16]", "must be text"),
        ("b: {kind: golden}", "b: lacks 'flags'"),
        ("b: {kind: gold, flags: ''}", "kind 'gold' is none of"),
        ("b: golden", "b: must be a mapping"),
        ("b: {kind: parity, flags: '', variants: {x: {}}}", "must hold two or more"),
        ("b: {kind: parity, flags: '', variants: {x: {flag: ''}, y: {}}}", "keys: flags, trainer"),
        ("b: {kind: parity, flags: '', variants: {x: {trainer: me}, y: {}}}", "trainer 'me'"),
        ("  - x", "0.yaml"),
    ],
)
def test_what_is_not_understood_is_an_error(tmp_path, lines, complaint):
    with pytest.raises(CaseError, match=complaint):
        load(tmp_path, f"{GOOD}{lines}\n")


def test_names_are_unique(tmp_path):
    with pytest.raises(CaseError, match=r"1.yaml: a is in another file"):
        load(tmp_path, GOOD, GOOD)


def test_metrics_are_read_from_the_log():
    assert metrics_of(f"something else\n{OUTPUT}") == METRICS_OF_TWO_STEPS
    assert set(METRICS_OF_TWO_STEPS) == set(METRICS)
    assert last_steps(METRICS_OF_TWO_STEPS, 1)["lm loss"] == [5.0]
    assert metrics_of(STEP.format(1, "nan"))["lm loss"] != [0.0]
    skipped = OUTPUT.replace("skipped iterations:   0", "skipped iterations:   1")
    assert metrics_of(skipped)["skipped"] == [1.0, 0.0]
    assert metrics_of(skipped)["lm loss"] == [5.5, 5.25]
    with pytest.raises(ValueError, match="no training step"):
        metrics_of("Traceback")
    with pytest.raises(ValueError, match="no 'grad norm'"):
        metrics_of(OUTPUT.replace("grad norm", "norm"))


SPREAD = {
    "lm loss": [0.0, 1e-6],
    "grad norm": [0.0, 1e-4],
    "params norm": [0.0, 0.0],
    "validation loss": [2e-6],
}
TOLERANCES = tolerances_of(SPREAD)


def changed(metric, *values):
    return METRICS_OF_TWO_STEPS | {metric: list(values)}


@pytest.mark.parametrize(
    ("metric", "values", "sentence"),
    [
        ("lm loss", [5.5, 5.0 * (1 + 1e-5)], "lm loss, value 2: 5.0 expected"),
        ("lm loss", [5.5 * (1 + 2e-6), 5.0], "lm loss, value 1"),
        ("lm loss", [5.5, float("nan")], "lm loss, value 2"),
        ("lm loss", [5.5], "lm loss: 2 values expected, 1 found"),
        ("grad norm", [1.138, 1.136], "grad norm, value 1"),
        ("grad norm", [1.136, 1.138], "grad norm, value 2"),
        ("learning rate", [8.3e-3, 8.4e-3], "learning rate, value 2"),
        ("skipped", [0.0, 1.0], "skipped, value 2"),
        ("validation loss", [], "validation loss: 1 values expected"),
    ],
)
def test_differences(metric, values, sentence):
    found = differences(METRICS_OF_TWO_STEPS, changed(metric, *values), TOLERANCES)
    assert len(found) == 1
    assert found[0].startswith(sentence)


def test_what_is_allowed():
    near = changed("lm loss", 5.5, 5.0 * (1 + 3e-6)) | {"grad norm": [1.136, 1.1374]}
    assert not differences(METRICS_OF_TWO_STEPS, near, TOLERANCES)
    assert largest_difference(METRICS_OF_TWO_STEPS, near, "lm loss") == pytest.approx(3e-6)
    assert len(differences(METRICS_OF_TWO_STEPS, near, RESUME, exact=True)) == 2


def test_a_spread_is_the_largest_difference_up_to_each_step():
    others = [
        changed("lm loss", 5.5 * (1 + 3e-6), 5.0),
        changed("lm loss", 5.5, 5.0 * (1 - 2e-6)) | {"validation loss": [4.5 * 1.5]},
        changed("grad norm", 1.136, float("nan")),
    ]
    spread = spread_of(METRICS_OF_TWO_STEPS, others)
    assert spread["lm loss"] == pytest.approx([3e-6, 3e-6])
    assert spread["validation loss"] == pytest.approx([0.5])
    assert spread["grad norm"] == [0.0, 1.0]
    assert spread["params norm"] == [0.0, 0.0]
    with pytest.raises(ValueError, match="skipped changes with last bits"):
        spread_of(METRICS_OF_TWO_STEPS, [changed("skipped", 0.0, 1.0)])


def test_tolerances_follow_from_the_spread():
    assert TOLERANCES["lm loss"] == pytest.approx([AS_PRINTED["lm loss"], FACTOR * 1e-6])
    assert TOLERANCES["grad norm"] == pytest.approx([0.0, FACTOR * 1e-4])
    assert TOLERANCES["learning rate"] == 0.0


def test_a_spread_without_a_bound_allows_any_finite_value():
    tolerances = tolerances_of(SPREAD | {"params norm": [0.0, UNBOUNDED]})
    norm = METRICS_OF_TWO_STEPS["params norm"]
    far = changed("params norm", norm[0], 1e3 * norm[1])
    assert not differences(METRICS_OF_TWO_STEPS, far, tolerances)
    for values in ([2 * norm[0], norm[1]], [norm[0], math.inf]):
        assert differences(METRICS_OF_TWO_STEPS, changed("params norm", *values), tolerances)


@pytest.mark.parametrize(
    ("losses", "validation", "compared"),
    [([0, 0], [0], 3), ([0, 0], [1], 2), ([0, 1], [1], 1), ([1, 1], [1], 0), ([1, 0], [0], 0)],
)
def test_values_that_stray_too_far_are_not_compared(losses, validation, compared):
    far = 1.01 * LARGEST / FACTOR
    spread = SPREAD | {
        "lm loss": [far * value for value in losses],
        "validation loss": [far * value for value in validation],
    }
    assert values_compared(tolerances_of(spread)) == compared
    first = first_values(METRICS_OF_TWO_STEPS, compared)
    assert first["lm loss"] == METRICS_OF_TWO_STEPS["lm loss"][:compared]
    assert len(first["grad norm"]) == min(compared, 2)
    assert bool(first["validation loss"]) == (compared == 3)


def write(tmp_path, case=CASE):
    return golden.write(case, "cpu_gloo", METRICS_OF_TWO_STEPS, SPREAD, tmp_path)


def test_recorded_files(tmp_path):
    path = write(tmp_path)
    assert path == tmp_path / "cpu_gloo" / "a.json"
    record = golden.read(CASE, "cpu_gloo", tmp_path)
    assert record["metrics"] == METRICS_OF_TWO_STEPS
    assert record["spread"] == SPREAD
    assert record["environment"] == golden.description("cpu_gloo")
    assert golden.compare_environments(record["environment"], "cpu_gloo") == ""
    other = record["environment"] | {"torch": "1.0"}
    assert "torch '1.0', here" in golden.compare_environments(other, "cpu_gloo")
    with pytest.raises(golden.GoldenError, match="a is not recorded in gpu_nccl: python -m"):
        golden.read(CASE, "gpu_nccl", tmp_path)


def test_each_model_of_gpu_has_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    path = golden.path_of("a", "gpu_nccl", tmp_path)
    assert path == tmp_path / "nccl_nvidia_h100_80gb_hbm3" / "a.json"


def test_of_other_kinds_the_spread_alone_is_recorded(tmp_path):
    case = Case("a", "parity", (), variants={"x": Variant(), "y": Variant(("--bf16",))})
    write(tmp_path, case)
    assert set(golden.read(case, "cpu_gloo", tmp_path)) & {"metrics", "spread"} == {"spread"}


@pytest.mark.parametrize("change", [{"flags": ("--bf16",)}, {"ranks": 1}], ids=["flags", "ranks"])
def test_stale_files_are_noticed(tmp_path, change):
    write(tmp_path)
    with pytest.raises(golden.GoldenError, match="is stale"):
        golden.read(replace(CASE, **change), "cpu_gloo", tmp_path)
    assert golden.read(replace(CASE, long=True), "cpu_gloo", tmp_path)  # computes the same


def test_a_spread_that_was_measured_otherwise_is_noticed(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setattr(golden, "_BASIS", ["another"])
    with pytest.raises(golden.GoldenError, match="is stale"):
        golden.read(CASE, "cpu_gloo", tmp_path)


def test_damaged_files_are_noticed(tmp_path):
    path = write(tmp_path)
    for text in (path.read_text()[:-20], "{}", path.read_text().replace('"nan"', '"nans"')):
        path.write_text(text)
        with pytest.raises(golden.GoldenError, match=r"damaged|other metrics"):
            golden.read(CASE, "cpu_gloo", tmp_path)


@pytest.mark.parametrize("argv", [[], ["no-such-case"], ["resume-plain"], ["--all", "dense"]])
def test_the_recorder_wants_recorded_cases(argv, capsys):
    with pytest.raises(SystemExit):
        main(argv)
    assert "error" in capsys.readouterr().err
