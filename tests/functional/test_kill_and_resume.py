"""One training that torchrun really starts: a rank is killed, the same command goes on.

``long/test_kill_and_resume.py`` does it again and again, at all moments.
"""

from pathlib import Path

import pytest

from tests.functional.kill_and_resume import (
    RUN,
    SAVE_INTERVAL,
    Kill,
    Start,
    differences,
    newest_whole,
    other_states,
    read,
    whole_losses,
)
from tests.functional.script import train

ITERATIONS = 12
TIMEOUT_S = 240.0
"""For one start, which takes 15 seconds where nothing else runs."""


@pytest.mark.long
def test_a_killed_training_goes_on_as_if_undisturbed(tmp_path: Path) -> None:
    saving = ["--save", str(tmp_path / "undisturbed"), "--save-interval", str(SAVE_INTERVAL)]
    expected = read(train(*RUN, *saving, "--train-iters", str(ITERATIONS), timeout=TIMEOUT_S))
    assert set(whole_losses(expected)) == set(range(1, ITERATIONS + 1))

    place, after_four_steps = tmp_path / "killed", Kill("step", 3, 0.0, rank=1)
    with Start(place, ITERATIONS, tmp_path / "first.log") as start:
        assert start.reaches(after_four_steps, TIMEOUT_S), start.output()[-3000:]
        assert start.kill(after_four_steps, TIMEOUT_S)
        assert start.wait(TIMEOUT_S) != 0
        killed = read(start.output())

    due = newest_whole(place)
    assert due >= SAVE_INTERVAL
    with Start(place, ITERATIONS, tmp_path / "second.log") as start:
        assert start.wait(TIMEOUT_S) == 0, start.output()[-3000:]
        resumed = read(start.output())
    assert resumed.loaded == due
    assert set(whole_losses(resumed)) == set(range(due + 1, ITERATIONS + 1))
    assert not [*differences(expected, killed), *differences(expected, resumed)]
    assert not [*other_states(tmp_path / "undisturbed", place)]
