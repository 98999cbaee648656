"""Malformed state dictionaries end in an error that explains itself."""

import functools
import random
from typing import Any

from tests.functional.outcomes import Outcomes
from tests.harness import run_ranks
from tests.harness.scene import forget_megatron
from tests.unit.stores.full_state import Case, build, steps

TIMEOUT_S = 500.0
MODEL = {"layers": 1, "hidden": 16, "heads": 2, "vocabulary": 16}

JUNK: list[Any] = [None, [], {}, 3, "x", {"optimizer": None}, {"param_groups": 3}, [None]]


def load_state_dicts(examples: int) -> Outcomes:
    """Change a place in the state dictionary of an optimizer, and load it."""
    outcomes = Outcomes()
    for storage in (True, False):
        flags = {"use_distributed_optimizer": storage}
        case = Case("muon", MODEL, ddp=flags, config=flags)
        chunk, optimizer = build(case)
        steps(case, chunk, optimizer, 0, 1)
        for number in range(examples // 2):
            chance = random.Random(number)
            state = changed(optimizer.state_dict(), chance, depth=chance.randrange(5))
            example = f"distributed {storage}, seed {number}"
            outcomes.add(example, functools.partial(optimizer.load_state_dict, state))
        forget_megatron()
    return outcomes


def changed(value: Any, chance: random.Random, depth: int) -> Any:
    """Return a copy in which one place, so deep at most, is something else or missing."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    if depth == 0 or not keys:
        return chance.choice(JUNK)
    copy, key = value.copy(), chance.choice(keys)
    if depth == 1 and chance.random() < 0.4:
        del copy[key]
    else:
        copy[key] = changed(value[key], chance, depth - 1)
    return copy


def test_state_dicts():
    (outcomes,) = run_ranks(1, load_state_dicts, 60, timeout=TIMEOUT_S)
    assert not outcomes.defects, "\n\n".join(outcomes.defects)
    assert outcomes.refused > 5
