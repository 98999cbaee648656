"""Several drawn changes that all tests are asked about at a time."""

from pathlib import Path
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from scripts.mutation import together
from scripts.mutation.changes import Change
from scripts.mutation.contexts import Timed
from scripts.mutation.together import failing_with, grouped, noticed
from tests.faults.trial import Ended

TESTS = [Timed(f"tests/{n % 3}.py::{n}", float(n)) for n in range(8)]
CHANGES = [
    Change(f"{n % 4}.py", "digest", "f", "number", (n, n), (n, n + 1), "2") for n in range(6)
]


@given(st.lists(st.sampled_from(CHANGES), unique=True), st.integers(1, 5))
def test_groups_have_each_change_once_and_no_file_twice(changes, size):
    groups = grouped(changes, size)
    each = [change for group in groups for change in group]
    assert sorted(map(CHANGES.index, each)) == sorted(map(CHANGES.index, changes))
    for group in groups:
        assert 0 < len({change.file for change in group}) == len(group) <= size


@given(st.lists(st.frozensets(st.sampled_from(CHANGES)), min_size=8, max_size=8))
def test_each_change_is_noticed_that_a_test_notices(effects):
    fails = dict(zip(TESTS, effects, strict=True))
    # a test executes more changes than it notices
    asked = {change: {test for test in TESTS if test.seconds < 7} for change in CHANGES}

    def alone(change, tests, _):
        return next((test.name for test in tests if change in fails[test]), None)

    def every(changes, tests, *_):
        return {test for test in tests if fails[test] & {*changes}}

    with mock.patch.multiple(together, noticed_alone=alone, failing_with=every):
        found = noticed(CHANGES, asked, Path(), 1)
    expected = {it for it in CHANGES if any(it in fails[test] for test in asked[it])}
    assert found.keys() == expected
    by_name = {test.name: its for test, its in fails.items()}
    assert all(change in by_name[test] for change, test in found.items())


def test_tests_that_cannot_be_named_are_run_with_their_files(tmp_path):
    a, b = TESTS[:2]
    for ends, expected in (
        ([Ended(1, [a.name])], {a}),
        ([Ended(4), Ended(1, [b.name])], {b}),
        ([Ended(4), Ended(None)], {a, b}),
    ):
        run = mock.Mock(side_effect=ends)
        with mock.patch.object(together, "run_tests", run):
            assert failing_with([], {a, b}, tmp_path, 2) == expected
        asked = [call.args[0] for call in run.call_args_list]
        assert asked == [[a.name, b.name], ["tests/0.py", "tests/1.py"]][: len(ends)]
