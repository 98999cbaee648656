"""``kill -9`` of a rank at random moments loses nothing but time."""

import pytest

from tests.functional.kill_and_resume import kill_and_resume, plan

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

KILLS, ITERATIONS, SEED = 10, 60, 1

TIMEOUT_S = 600.0
"""For one start of the run, which takes 15 seconds where nothing else runs."""


def test_ten_kills_change_nothing(tmp_path, record_property, capsys):
    def say(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)  # noqa: T201

    say(f"\nseed {SEED}")
    kills = plan(KILLS, SEED)
    report = kill_and_resume(tmp_path, kills, ITERATIONS, TIMEOUT_S, say)
    assert not report.problems
    assert len(report.kills) == KILLS
    assert {kill.kind for kill in report.kills} == {"save", "step", "start"}
    # some were in the middle of a save, and most of the run was done by processes that went on
    assert report.unfinished >= 3
    assert len([step for step in report.loaded if step > 0]) >= 3
    assert report.iterations >= ITERATIONS
    record_property("kills that left an unfinished checkpoint", report.unfinished)
    record_property("iterations computed", report.iterations)
    record_property("iterations lost", report.iterations - ITERATIONS)
