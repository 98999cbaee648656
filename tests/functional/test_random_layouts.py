"""Fresh random layouts in every run, each judged by one process in float64.

A draw has a storage, sizes of parallel groups, an optimizer, a dtype, parameters that are frozen or
have no gradient in some steps, and a checkpoint that another layout loads. ``LAYOUT_SEED`` repeats
one draw.
"""

import os
from dataclasses import replace

import pytest

from tests.functional.random_layouts.draws import DRAWS, Layout, draw_of
from tests.functional.random_layouts.runs import fresh_seed
from tests.functional.random_layouts.trial import problems_of


def seed_of(number: int) -> int:
    """Return a fresh seed of a number, or the one that the environment asks for."""
    given = os.environ.get("LAYOUT_SEED")
    if given is None:
        return fresh_seed(number)
    if int(given) % DRAWS != number:
        pytest.skip(f"LAYOUT_SEED={given} is another draw")
    return int(given)


# the number of a draw, and not its seed, so that all workers of pytest-xdist collect the same
@pytest.mark.parametrize("number", range(DRAWS))
def test_ranks_train_as_one_process(number, tmp_path, capsys):
    draw = draw_of(seed_of(number))
    with capsys.disabled():
        print(f"\n{draw.command}")  # noqa: T201  a run of the tests tells what it has drawn
    problems = problems_of(draw, tmp_path)
    assert not problems, "\n".join([f"Repeat with: {draw.command}", str(draw), *problems])


def test_a_rank_of_which_all_experts_are_frozen(tmp_path):
    """A draw that is rare, and that had to wait for ever."""
    draw = next(draw for draw in map(draw_of, range(1000)) if draw.optimizer == "muon")
    layouts = Layout("zero1", 4, tp=2, ep=4), Layout("zero1", 2, tp=2, ep=2)
    draw = replace(draw, layouts=layouts, frozen=("moe.local_experts.0.weight",))
    assert not problems_of(draw, tmp_path)
