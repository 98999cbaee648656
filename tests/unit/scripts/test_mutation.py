"""What is drawn, which tests are asked, and what counts as noticed."""

import inspect
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_eopt.layouts import Layout
from scripts.mutation import trial
from scripts.mutation.__main__ import drawn
from scripts.mutation.changes import ROOT, Change, changes_of, core_files, room_of
from scripts.mutation.contexts import Contexts, Timed, in_turns
from scripts.mutation.lines import Followed
from scripts.mutation.recorder import executed
from scripts.mutation.report import interval, report
from scripts.mutation.trial import Result, noticed_by, still_holds, tried, within
from tests.faults.trial import Ended
from tests.harness import RankError, run_ranks

FILE = "megatron_eopt/layouts/some.py"
CHANGE = Change(FILE, "digest", "f", "number", (10, 12), (0, 1), "2")
FAST, SLOW = Timed("tests/unit/layouts/test_plan.py::a", 1.0), Timed("tests/b.py::b", 30.0)


def parts(text):
    """Return what each change of a function's text replaces, and what it becomes."""
    changes = changes_of(FILE, text)
    return [(text.encode()[slice(*it.place)].decode(), it.new) for it in changes]


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("x = a and b", [("a and b", "(a or b)"), ("a and b", "(b)"), ("a and b", "(a)")]),
        ("x = a < b", [("a < b", "(a <= b)")]),
        ("x = a in b", [("a in b", "(a not in b)")]),
        ("x = a is None", [("a is None", "(a is not None)")]),
        ("x = a // b", [("a // b", "(a / b)")]),
        ("x += y", [("x += y", "x -= y")]),
        ("x = not a", [("not a", "(a)")]),
        ("x = 7", [("7", "8")]),
        ("x: int = 7", [("7", "8")]),
        ("x = True", [("True", "False")]),
        ("if a: pass", [("a", "(a or True)"), ("a", "(a and False)")]),
        ("x = b if a else c", [("a", "(a or True)"), ("a", "(a and False)")]),
        ("x = [b for b in c if a]", [("a", "(a or True)"), ("a", "(a and False)")]),
        ("return a", [("a", "None")]),
        ("return", []),
        ("for a in b: continue", [("continue", "break")]),
        ("x = 'a'", []),
        ("x = f'{a + 1}'", []),
        ("raise ValueError(a + 1)", []),
        ("logger.warning(a, 1)", []),
        ("assert not a, b + 1", [("not a", "(a)")]),
    ],
)
def test_what_a_statement_becomes(statement, expected):
    assert sorted(parts(f"def f():\n    {statement}\n")) == sorted(expected)


def test_constants_outside_functions_stay_but_not_defaults():
    text = "A = 1\n@b(2)\nclass C:\n    d = 3\n    def f(self, g: e[4] = 5):\n        return None\n"
    assert parts(text) == [("5", "6")]
    (change,) = changes_of(FILE, text)
    assert (change.function, change.lines) == ("C.f", (5, 6))
    assert parts("table = {'a': lambda: 1}\n") == [("1", "2")]


def test_the_lines_of_a_statement_are_its_own():
    text = "def f(é):\n    if (\n        é\n        > 0\n    ):\n        return 1\n"
    places = {change.new: change.lines for change in changes_of(FILE, text)}
    assert (places["(é >= 0)"], places["None"]) == ((2, 5), (6, 6))
    (bound,) = (it for it in changes_of(FILE, text) if it.new == "(é >= 0)")
    assert bound.applied(text).splitlines()[2] == "        (é >= 0)"
    assert "+        (é >= 0)" in bound.diff(text)


def test_changes_of_the_package_can_be_imported():
    texts = core_files()
    every = [change for file, text in texts.items() for change in changes_of(file, text)]
    assert {"optimizers", "wrappers", "checkpoint"} < {room_of(file) for file in texts}
    assert not {"tools", "testing", "cpu"} & {room_of(file) for file in texts}
    assert len({change.key for change in every}) == len(every)
    few = drawn(every, 20, "seed")
    assert drawn(every, 30, "seed")[:20] == few
    for change in few:
        changed = change.applied(texts[change.file])
        assert changed != texts[change.file]
        compile(changed, change.file, "exec")


def make_layout(fails):
    Layout.slabs((4, 2), 0, [0, 1])
    if fails:
        raise ValueError("after that")


@pytest.mark.parametrize("fails", [False, True])
def test_worker_processes_tell_what_they_execute(fails, tmp_path):
    log = tmp_path / "log"
    try:
        run_ranks(2, Followed(make_layout, log), fails)
    except RankError:
        assert fails
    source, first = inspect.getsourcelines(Layout.slabs)
    lines = executed(log)["megatron_eopt/layouts/layout.py"]
    assert {*range(first, first + len(source))} & {*lines}


def known(before=(), **lines):
    tests = {test: {FILE: lines.get(name, [])} for name, test in (("slow", SLOW), ("fast", FAST))}
    return Contexts({FILE: "digest"}, {FILE: before}, tests)


def test_the_fastest_of_each_file_are_asked_first():
    names = ("x::a", "x::b", "y::c", "x::d")
    a, b, c, d = (Timed(f"tests/{name}", seconds) for seconds, name in enumerate(names))
    assert in_turns([d, b, c, a]) == [a, c, b, d]


def test_tests_that_execute_a_line_are_asked(monkeypatch):
    monkeypatch.setattr(Contexts, "sharing", set())
    assert known(fast=[9, 13]).tests_of(CHANGE) == []
    assert known(fast=[9, 11], slow=[12]).tests_of(CHANGE) == [FAST, SLOW]
    assert known(before=[10]).tests_of(CHANGE) == [FAST]  # the room's
    with pytest.raises(ValueError, match=r"some\.py has changed since --contexts"):
        known().tests_of(replace(CHANGE, digest="another"))


def test_tests_that_share_results_are_all_asked(monkeypatch):
    other = Timed("tests/b.py::other", 0.1)
    monkeypatch.setattr(Contexts, "sharing", {"tests/b.py"})
    contexts = known(slow=[11])
    assert replace(contexts, tests={**contexts.tests, other: {}}).tests_of(CHANGE) == [other, SLOW]


def test_time_bounds_the_tests():
    assert within([FAST, SLOW], 31) == [FAST, SLOW]
    assert within([FAST, SLOW], 30) == [FAST]
    assert within([SLOW, SLOW], 1) == [SLOW]
    assert within([FAST, SLOW, FAST], 10) == [FAST, FAST]  # what does not fit is left out


@pytest.mark.parametrize(
    ("ended", "notice"),
    [
        (Ended(0), None),
        (Ended(1, ["tests/b.py::b", "c"]), "tests/b.py::b"),
        (Ended(None), "it hangs"),
        (Ended(2, ["tests/b.py"]), "tests/b.py"),
        (Ended(4, (), "ImportError while loading conftest"), "pytest stops"),
        (Ended(-11), "pytest stops"),
    ],
)
def test_what_notices(ended, notice, monkeypatch):
    monkeypatch.setattr(trial, "run_tests", lambda *_: ended)
    assert noticed_by([SLOW], Path()) == notice


def test_tests_with_other_names_run_with_their_file(monkeypatch):
    asked = []

    def run(tests, *_):
        asked.append(tests)
        return Ended(4, (), "ERROR: not found: b") if len(asked) == 1 else Ended(0)

    monkeypatch.setattr(trial, "run_tests", run)
    assert noticed_by([SLOW], Path()) is None
    assert asked == [["tests/b.py::b"], ["tests/b.py"]]


@pytest.fixture
def file(tmp_path):
    """The file that is changed, in a copy of the repository."""
    file = tmp_path / FILE
    file.parent.mkdir(parents=True)
    file.write_text("1")
    return file


def test_a_change_is_tried_with_fast_tests_first(monkeypatch, tmp_path, file):
    asked = []

    def notice(tests, _):
        asked.append((tests, file.read_text()))
        return "tests/b.py::b" if SLOW in tests else None

    monkeypatch.setattr(trial, "noticed_by", notice)
    result = tried(CHANGE, [FAST, SLOW], tmp_path, 600)
    assert (result.verdict, result.is_noticed) == ("tests/b.py::b", True)
    assert asked == [([FAST], "2"), ([SLOW], "2")]
    assert file.read_text() == "1"
    assert not tried(CHANGE, [], tmp_path, 600).is_noticed


def test_a_result_holds_until_other_tests_execute_the_change(monkeypatch, tmp_path, file):
    monkeypatch.setattr(trial, "noticed_by", lambda *_: None)
    result = tried(CHANGE, [FAST, SLOW], tmp_path, 2)
    assert result.left_out == 1
    assert still_holds(result, [FAST, SLOW], 2)
    assert not still_holds(result, [FAST, SLOW], 600)
    assert still_holds(replace(result, is_noticed=True), [SLOW], 600)
    assert not still_holds(None, [FAST], 600)


@pytest.mark.parametrize("without", [None, "it hangs"])
def test_tests_that_hang_without_the_change_notice_nothing(without, monkeypatch, tmp_path, file):
    found = {"1": without, "2": "it hangs"}
    monkeypatch.setattr(trial, "noticed_by", lambda *_: found[file.read_text()])
    assert tried(CHANGE, [FAST], tmp_path, 600).is_noticed == (without is None)


def test_a_test_that_fails_without_the_change_notices_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(trial, "FILE", tmp_path / "results")
    monkeypatch.setattr(trial, "in_copies", lambda call, items, jobs: (call(*items, tmp_path),))
    monkeypatch.setattr(trial, "noticed_by", lambda rest, _: SLOW.name if SLOW in rest else None)
    results = [Result(name, "digest", name, True, "", 0, 1.0) for name in (FAST.name, SLOW.name)]
    (wrong,) = trial.corrected(results, known())
    assert (wrong.name, wrong.is_noticed) == (SLOW.name, False)
    assert trial.earlier() == {wrong.key: wrong}


def test_the_report():
    assert interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert interval(10, 10) == pytest.approx((0.7225, 1), abs=1e-4)
    missed = Result(*CHANGE.key, "not noticed by 3 tests", False, "", 2, 1.0)
    other = replace(CHANGE, file="megatron_eopt/muon.py")
    results = [(CHANGE, missed), (other, replace(missed, is_noticed=True))]
    text = report(results, {FILE: "1\n"}, "seed", 1234)
    assert "1 of 2 changes were noticed, drawn from 1,234 with seed `seed`: 50.0%" in text
    assert "| `layouts` | 1 | 0 | 1 | 0% |\n| `top` | 1 | 1 | 0 | 100% |\n| all | 2 | 1 | 1" in text
    assert "not noticed by 3 tests, 2 slower ones left out" in text
    assert "-1\n+2" in text


def test_files_are_those_of_this_repository():
    assert Path(ROOT).samefile(Path(__file__).parents[3])
