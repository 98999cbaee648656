"""One draw, trained by ranks and by the judge."""

from pathlib import Path

from tests.functional.random_layouts.draws import STEPS, TRAINERS, Draw
from tests.functional.random_layouts.judge import Judge
from tests.functional.random_layouts.ranks import resume, train
from tests.harness import run_ranks
from tests.unit.fsdp2.models import eager

TIMEOUT_S = 60.0


@eager
def problems_of(draw: Draw, folder: Path, timeout: float = TIMEOUT_S) -> list[str]:
    """Return what ranks do otherwise than the judge, before and after a checkpoint."""
    judge, problems, first = Judge(draw), [], 0
    cpu = draw.layouts[0].storage in TRAINERS[0]
    place = folder / "checkpoint"
    for layout, job, steps in zip(draw.layouts, (train, resume), STEPS, strict=True):
        for step in range(first, first + steps):
            judge.take(step)
        first += steps
        arguments = draw, str(place), judge.expected, judge.norms
        place.mkdir(exist_ok=True)
        found = run_ranks(layout.ranks, job, *arguments, timeout=timeout, cpu=cpu)
        problems += [f"{job.__name__}, {line}" for lines in found for line in lines]
    return problems
